"""The panels of a dimension that rows shard in one operand and columns shard in the other."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from gridformer.parallel.tensor.summa.panels import Panel, panels

SIZES = st.integers(1, 24)


@given(rows=SIZES, cols=SIZES, per_block=st.integers(1, 5))
def test_panels_are_the_common_refinement(rows: int, cols: int, per_block: int) -> None:
    size = math.lcm(rows, cols) * per_block
    found = list(panels(size, rows, cols))
    assert len(found) == rows + cols - math.gcd(rows, cols)

    covered = 0
    for panel in found:
        start, stop = covered, covered + panel.width
        assert (panel.start, panel.stop) == (start, stop)
        assert panel.width > 0
        for owner, where, blocks in (
            (panel.row, panel.in_row, rows),
            (panel.col, panel.in_col, cols),
        ):
            block = size // blocks
            assert 0 <= owner < blocks
            # Panels are in order, without gaps, and each lies within one block of both operands.
            assert (owner * block + where.start, owner * block + where.stop) == (start, stop)
            assert 0 <= where.start < where.stop <= block
        covered = stop
    assert covered == size


@given(rows=SIZES, cols=SIZES)
def test_every_block_is_made_of_whole_panels(rows: int, cols: int) -> None:
    size = math.lcm(rows, cols) * 2
    found = list(panels(size, rows, cols))
    for row in range(rows):
        assert sum(p.width for p in found if p.row == row) == size // rows
    for col in range(cols):
        assert sum(p.width for p in found if p.col == col) == size // cols


def test_panels_of_2x3() -> None:
    """12 columns are cut at 6 by the rows, and at 4 and 8 by the columns."""
    assert list(panels(12, 2, 3)) == [
        Panel(0, 4, row=0, col=0, in_row=slice(0, 4), in_col=slice(0, 4)),
        Panel(4, 6, row=0, col=1, in_row=slice(4, 6), in_col=slice(0, 2)),
        Panel(6, 8, row=1, col=1, in_row=slice(0, 2), in_col=slice(2, 4)),
        Panel(8, 12, row=1, col=2, in_row=slice(2, 6), in_col=slice(0, 4)),
    ]


@given(n=SIZES, per_block=st.integers(1, 5))
def test_a_square_grid_has_one_panel_a_rank(n: int, per_block: int) -> None:
    """As in the paper, panel l is block l of both operands."""
    for index, panel in enumerate(panels(n * per_block, n, n)):
        assert panel.row == panel.col == index
        assert panel.in_row == panel.in_col == slice(0, per_block)
