"""Keys of run files that have another name now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Old dotted key: new dotted key, of the same section.
RENAMED = {"train.loss_tokens": "train.loss_chunk_tokens"}


def with_new_names(run: Mapping[str, Any]) -> dict[str, Any]:
    """A run as an older version saved it, with the keys that it has now.

    Run files that people write are not read through this: there an old key is refused, and the
    refusal names the new one.
    """
    sections = {
        name: dict(section) if isinstance(section, Mapping) else section
        for name, section in run.items()
    }
    for old, new in RENAMED.items():
        (section, old_key), new_key = old.split("."), new.split(".")[1]
        values = sections.get(section)
        if isinstance(values, dict) and old_key in values:
            values.setdefault(new_key, values.pop(old_key))
    return sections
