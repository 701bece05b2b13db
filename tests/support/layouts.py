"""Grids of devices without processes, enough to see what each device would hold."""

from collections.abc import Iterator

from gridformer.config import LayoutConfig
from gridformer.mesh import Axes, Axis
from gridformer.parallel.registry import describe_layout

LAYOUTS = [
    LayoutConfig(scheme="single"),
    LayoutConfig(scheme="megatron", cols=3),
    LayoutConfig(scheme="megatron", cols=4, sequence_parallel=True),
    LayoutConfig(scheme="megatron_2d", rows=2, cols=3),
    LayoutConfig(scheme="megatron_2d", rows=4, cols=1),
    LayoutConfig(scheme="optimus", rows=1, cols=4),
    LayoutConfig(scheme="optimus", rows=4, cols=1),
    LayoutConfig(scheme="optimus", rows=2, cols=2),
    LayoutConfig(scheme="optimus", rows=2, cols=3),
    LayoutConfig(scheme="optimus", rows=3, cols=4),
    LayoutConfig(scheme="optimus", rows=2, cols=3, stationary="input", schedule="broadcast"),
    LayoutConfig(scheme="optimus", rows=3, cols=2, stationary="output", schedule="pipelined"),
]


def name_of(layout: LayoutConfig) -> str:
    how = [word for word in (layout.stationary, layout.schedule) if word != "auto"]
    return ", ".join([describe_layout(layout), *how])


def ranks(rows: int, cols: int) -> Iterator[Axes]:
    """Yield the axes as each device of a grid sees them; placement needs no process group."""
    for row in range(rows):
        for col in range(cols):
            n, here = rows * cols, row * cols + col
            yield Axes(
                row=Axis("row", rows, row),
                col=Axis("col", cols, col),
                grid=Axis("grid", n, here),
                world=Axis("world", n, here),
            )
