"""Grids of devices without processes: enough to see what each device would hold."""

from __future__ import annotations

from collections.abc import Iterator

from gridformer.comm import Axes, Axis
from gridformer.config import LayoutConfig

LAYOUTS = [
    LayoutConfig(scheme="single"),
    LayoutConfig(scheme="megatron", cols=3),
    LayoutConfig(scheme="megatron", cols=4, sequence_parallel=True),
    LayoutConfig(scheme="optimus", rows=1, cols=4),
    LayoutConfig(scheme="optimus", rows=4, cols=1),
    LayoutConfig(scheme="optimus", rows=2, cols=2),
    LayoutConfig(scheme="optimus", rows=2, cols=3),
    LayoutConfig(scheme="optimus", rows=3, cols=4),
]


def ranks(rows: int, cols: int) -> Iterator[Axes]:
    """The axes as every device of a grid sees them; no process group is needed to place."""
    for row in range(rows):
        for col in range(cols):
            world = Axis("world", rows * cols, row * cols + col)
            yield Axes(row=Axis("row", rows, row), col=Axis("col", cols, col), world=world)
