"""The scheme of one device per replica: the reference that every other scheme must equal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gridformer.config import LayoutConfig
from gridformer.parallel.scheme import SchemeSpec


class Single(SchemeSpec):
    """The spec of a model that one device holds in full."""

    name = "single"

    def describe(self, layout: LayoutConfig) -> str:
        return "single device"

    def arrangements(self, devices: int) -> Iterator[dict[str, Any]]:
        if devices == 1:
            yield {}

    def grid(self, layout: LayoutConfig) -> tuple[int, int]:
        return 1, 1
