"""The benchmark that tries torch's FSDP2: it passes what is right and tells torch's own message."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from benchmarks.fsdp2 import cells, sides
from benchmarks.fsdp2.cells import CELLS, Cell

from tests.support.multirank.pool import WorkerPool

NAMED = {cell.name: cell for cell in CELLS}


def test_names_are_unique_and_layouts_valid() -> None:
    assert len(NAMED) == len(CELLS)
    assert {cell.plan.n_processes for cell in CELLS} == {2, 3, 4}


def compared(cell: Cell, factor: float) -> dict[str, float | bool]:
    """Compare a cell in this group; the sums of gradients are multiplied by a factor."""
    build = sides.on_layout

    def other(*args: object) -> object:
        side = build(*args)  # type: ignore[arg-type]
        for module in side.model.modules():
            if isinstance(module, cells.FSDPModule):
                module.set_gradient_divide_factor(1 / factor)
        return side

    with patch.dict(cells.BUILDS, {"layout": other}):
        found: dict[str, float | bool] = cells._compared(cell)
    return found


@pytest.mark.parametrize("factor", [1.0, 1.0001])
def test_a_cell_passes_only_if_nothing_differs(pool: WorkerPool, factor: float) -> None:
    for found in pool.run(2, compared, NAMED["replicas over 2"], factor):
        assert found["passed"] == (factor == 1.0), found
