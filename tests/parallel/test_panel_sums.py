"""Panels of bfloat16 are accumulated in float32: many panels are as accurate as one product."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from gridformer.mesh import Axes
from gridformer.parallel.tensor.summa import Broadcast, Operand, Panel, Pipelined

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

    with (
        patch.object(summa, "_arriving", panels_of),
        patch.object(Tensor, "addmm_", watched),
    ):
        c = summa.ab(Operand(a), Operand(b))
    assert {*seen} == {c.data_ptr()}
