"""The benchmark that tries torch's FSDP2: it passes what is right and tells torch's own message."""

from __future__ import annotations

from benchmarks.fsdp2.cells import CELLS

NAMED = {cell.name: cell for cell in CELLS}


def test_names_are_unique_and_layouts_valid() -> None:
    assert len(NAMED) == len(CELLS)
    assert {cell.plan.n_processes for cell in CELLS} == {2, 3, 4}
