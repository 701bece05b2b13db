"""The panels over which SUMMA loops: ranges of a dimension within one block of either matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Panel:
    """The range [start, stop) of a dimension, and its position in the blocks of its owners.

    Attributes:
        col: Column of devices that owns the range where the dimension is sharded over columns.
        row: Row of devices that owns it where the dimension is sharded over rows.
        in_col: The range within the block of column `col`.
        in_row: The range within the block of row `row`.
    """

    start: int
    stop: int
    col: int
    row: int
    in_col: slice
    in_row: slice

    @property
    def width(self) -> int:
        return self.stop - self.start


def panels(size: int, rows: int, cols: int) -> Iterator[Panel]:
    """Yields the panels of a dimension that is sharded over rows in one matrix, columns in another.

    They are the common refinement of both ways to shard it: rows + cols - gcd(rows, cols) panels.

    Args:
        size: Global size of the dimension; must be divisible by `rows` and by `cols`.
        rows: Number of rows of the grid.
        cols: Number of columns of the grid.
    """
    per_row, per_col = size // rows, size // cols
    cuts = sorted({*range(0, size, per_row), *range(0, size, per_col), size})
    for start, stop in pairwise(cuts):
        col, row = start // per_col, start // per_row
        yield Panel(
            start=start,
            stop=stop,
            col=col,
            row=row,
            in_col=slice(start - col * per_col, stop - col * per_col),
            in_row=slice(start - row * per_row, stop - row * per_row),
        )
