"""Where a source is being read, so that reading can go on there later."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ReadingPlace:
    """Where a source is being read. The source calls `reached` at places where it can begin."""

    mark: Any = None
    items: int = 0
    skipped: dict[str, int] = field(default_factory=dict)

    def reached(self, mark: object, skipped: Counter[str]) -> None:
        """Tells that the next item is the first one after `mark`, a value that JSON can hold."""
        self.mark, self.items, self.skipped = json.loads(json.dumps(mark)), 0, dict(skipped)
