"""The panels in which SUMMA walks a dimension that two operands cut differently."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Panel:
    """The range [start, stop) of a dimension, and where it lies within its owners' blocks."""

    start: int
    stop: int
    col: int  # owner column, and the range within its block
    row: int  # owner row, and the range within its block
    in_col: slice
    in_row: slice

    @property
    def width(self) -> int:
        return self.stop - self.start


def panels(size: int, rows: int, cols: int) -> Iterator[Panel]:
    """The common refinement of cutting `size` over `rows` and over `cols`, in order.

    There are rows + cols - gcd(rows, cols) of them. `size` must divide by both.
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
