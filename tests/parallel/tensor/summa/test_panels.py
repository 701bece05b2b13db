"""The panels of a dimension, and how accurate sums over them are."""

import math
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gridformer.mesh import Axes
from gridformer.parallel.tensor.summa import Broadcast, Operand, Panel, Pipelined
from gridformer.parallel.tensor.summa.panels import panels

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


def test_panels_of_2x3() -> None:
    """12 columns are cut at 6 by the rows, and at 4 and 8 by the columns."""
    assert list(panels(12, 2, 3)) == [
        Panel(0, 4, row=0, col=0, in_row=slice(0, 4), in_col=slice(0, 4)),
        Panel(4, 6, row=0, col=1, in_row=slice(4, 6), in_col=slice(0, 2)),
        Panel(6, 8, row=1, col=1, in_row=slice(0, 2), in_col=slice(2, 4)),
        Panel(8, 12, row=1, col=2, in_row=slice(2, 6), in_col=slice(0, 4)),
    ]


N_PANELS = 16


def panels_of(
    size: int, along_rows: Operand, down_columns: Operand
) -> Iterator[tuple[Panel, Tensor, Tensor]]:
    """Yield the panels of both operands, all of which are on this device."""
    width = size // N_PANELS
    for start in range(0, size, width):
        part = slice(start, start + width)
        panel = Panel(start, start + width, 0, 0, part, part)
        yield panel, along_rows.local[..., part], down_columns.local[part]


def error(c: Tensor, wanted: Tensor) -> float:
    return float((c.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("schedule", [Broadcast, Pipelined])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_panels_are_as_accurate_as_one(schedule: type[Broadcast], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(4, 32, 256).to(dtype), torch.randn(256, 48).to(dtype)
    wanted = a.double() @ b.double()
    summa = schedule(Axes())
    with patch.object(summa, "_arriving", panels_of):
        c = summa.ab(Operand(a), Operand(b))
    assert c.dtype == dtype
    once = (a.float() @ b.float()).to(dtype)  # rounded once
    assert error(c, wanted) < 1.5 * error(once, wanted)


def test_float32_is_added_to_in_place() -> None:
    """A result in a wide enough type is not copied."""
    a, b = torch.randn(4, 64), torch.randn(64, 8)
    summa, seen = Broadcast(Axes()), []

    real = Tensor.addmm_

    def watched(c: Tensor, *factors: Tensor) -> Tensor:
        seen.append(c.data_ptr())
        return real(c, *factors)

    with patch.object(summa, "_arriving", panels_of), patch.object(Tensor, "addmm_", watched):
        c = summa.ab(Operand(a), Operand(b))
    assert {*seen} == {c.data_ptr()}
