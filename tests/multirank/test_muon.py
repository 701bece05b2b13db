"""Muon on grids: blocks of matrices whose sizes do not divide, and what travels."""

from collections import defaultdict
from typing import Any

import pytest
import torch

from gridformer.comm import record_messages
from gridformer.config import LayoutConfig
from gridformer.mesh import Axis
from gridformer.parallel.axes import build_axes
from gridformer.train.muon import orthogonalized
from tests.support.multirank.pool import WorkerPool

GRIDS = [(2, 2), (1, 3), (3, 1), (3, 2), (2, 3)]
# Of a block: one that is wide, one that is tall, some that need padding, one of an element.
BLOCKS = [(4, 6), (6, 4), (1, 5), (5, 1), (3, 7), (7, 3), (1, 1)]
WHOLE = Axis("whole")


def blocks_differ(layout: dict[str, Any], turned: bool) -> float:
    """Orthogonalize matrices, several at a time too, on a grid and on one device."""
    axes = build_axes(LayoutConfig(**layout), "cpu")
    rows, cols = (axes.col, axes.row) if turned else (axes.row, axes.col)
    worst = 0.0
    for number, (k, n) in enumerate(BLOCKS):
        generator = torch.Generator().manual_seed(number)
        shape = 2, k * rows.size, n * cols.size
        whole = torch.randn(shape, dtype=torch.float64, generator=generator)
        want = orthogonalized(whole, WHOLE, WHOLE)
        mine = whole.unflatten(2, (cols.size, n))[:, :, cols.index]
        mine = mine.unflatten(1, (rows.size, k))[:, rows.index]
        expected = want.unflatten(2, (cols.size, n))[:, :, cols.index]
        expected = expected.unflatten(1, (rows.size, k))[:, rows.index]
        got = orthogonalized(mine, rows, cols)
        worst = max(worst, float((got - expected).abs().max()))
    return worst


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: "x".join(map(str, grid)))
def test_blocks_of_a_grid_are_those_of_the_whole_matrix(
    pool: WorkerPool, grid: tuple[int, int], turned: bool
) -> None:
    rows, cols = grid
    layout = {"scheme": "optimus", "rows": rows, "cols": cols}
    assert max(pool.run(rows * cols, blocks_differ, layout, turned)) < 1e-12


def moved(k: int, n: int) -> dict[str, float]:
    axes = build_axes(LayoutConfig(scheme="optimus", rows=2, cols=2), "cpu")
    with record_messages() as recorder:
        orthogonalized(torch.randn(1, k, n), axes.row, axes.col)
    found: dict[str, float] = defaultdict(float)
    for one in recorder.records:
        found[f"{one.op} over {one.axis}"] += one.moved
    return dict(found)


def test_a_turn_moves_the_blocks_once_and_four_blocks_of_the_square(pool: WorkerPool) -> None:
    """Of a 2x2 grid with blocks [4, 6], X Xᵀ has blocks [4, 4]; it is as small for [6, 4]."""
    blocks, square = 4 * 6, 4 * 4
    norms = {"all_reduce over row": 1.0, "all_reduce over col": 1.0}
    for wide in pool.run(4, moved, 4, 6):
        assert wide == {
            **norms,
            **{"all_gather over row": 5 * (blocks + square)},
            **{"all_gather over col": 5 * 2 * square, "reduce_scatter over col": 5 * square},
        }
    for tall in pool.run(4, moved, 6, 4):
        assert tall == {
            **norms,
            **{"all_gather over col": 5 * (blocks + square)},
            **{"all_gather over row": 5 * 2 * square, "reduce_scatter over row": 5 * square},
        }
