"""Where meshes lie on nodes and racks: groups and indices of rank_grid, and the bytes that enter.

Collectives that ran are recorded with their groups, and sent around the ring of each group in the
order of its ranks. As in test_explained.py, one layer is the difference of two models.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gridformer.comm import record_messages
from gridformer.config import RunConfig
from gridformer.data.samples.order import Rows
from gridformer.mesh import Axes
from gridformer.mesh.node_placement import MESH_AXES, NodeBlock, Sizes, rank_grid
from gridformer.parallel import build_parallel
from gridformer.parallel.auto.decisions import decide_run
from gridformer.parallel.axes import build_axes
from gridformer.train.step import Stepper
from gridformer.utils.batch import Batch
from tests.support.multirank.exactness import CPU, batches_of, tiny
from tests.support.multirank.memory import a_run
from tests.support.multirank.pool import WorkerPool

GRID = {"scheme": "optimus", "rows": 4, "cols": 2, "devices_per_node": 2, "nodes_per_rack": 2}
UNITS = {"node": 2, "rack": 4}  # devices
N, B = 8, 16


def run_of(n_layers: int, changes: dict[str, Any]) -> RunConfig:
    return a_run(
        {**GRID, **changes}, {"n_layers": n_layers, "max_seq_len": 12}, {"global_batch": B}
    )


def received(run: RunConfig, block: NodeBlock) -> list[tuple[int, bool, float]]:
    """Return for each message of products the rank before this one, if it is a row, and bytes."""
    torch.set_num_threads(1)
    axes = build_axes(run.layout, "cpu", block)
    model = build_parallel(run.model, run.layout, axes, 1, CPU, choices=decide_run(run).choices)
    batch = batches_of(0, tiny(n_layers=1, max_seq_len=12), B)

    def read(rows: Rows) -> Batch:
        return {key: value[rows] for key, value in batch.items()}

    with record_messages() as recorder:
        Stepper(model, run.train, axes, run.layout)(0, partial(read))
    before = {}
    for axis in (axes.row, axes.col):
        ring = sorted(axis.ranks)
        before[axis.name] = ring[ring.index(dist.get_rank()) - 1]
    found = [r for r in recorder.records if r.label in ("product", "kept")]
    return [(before[r.axis], r.axis == "row", r.bytes) for r in found]


def entered(pool: WorkerPool, run: RunConfig, block: NodeBlock, unit: int) -> dict[Any, float]:
    """Return the bytes that enter each unit, by unit and by whether they travel along rows."""
    sums: dict[Any, float] = defaultdict(float)
    for rank, messages in enumerate(pool.run(N, received, run, block)):
        for before, is_row, n_bytes in messages:
            if before // unit != rank // unit:
                sums[rank // unit, is_row] += n_bytes
    return sums


@pytest.mark.parametrize("changes", [{}, {"rows": 2, "cols": 4}], ids=["4x2", "2x4"])
def test_bytes_into_nodes_and_racks(pool: WorkerPool, changes: dict[str, Any]) -> None:
    one, two = (run_of(n, changes) for n in (1, 2))
    decided, less = decide_run(two), decide_run(one)
    assert decided.block is not None
    assert decided.block.rack is not None
    assert less.block == decided.block
    said = {
        "node": (less.candidates[0].bytes_in, decided.candidates[0].bytes_in),
        "rack": (less.racks[0].bytes_in, decided.racks[0].bytes_in),
    }
    for name, unit in UNITS.items():
        few, many = said[name]
        small, large = (entered(pool, run, decided.block, unit) for run in (one, two))
        for number in range(N // unit):
            for axis in ("row", "col"):
                key = number, axis == "row"
                found = large[key] - small[key]
                assert found == pytest.approx(many[axis] - few[axis], rel=1e-9), (name, key)
        assert sum(large.values()) > sum(small.values())


Seen = dict[str, tuple[int, list[int]]]

# Blocks whose rank order is not the plain one.
PLACEMENTS: list[tuple[Sizes, NodeBlock]] = [
    ((1, 1, 2, 2), NodeBlock(row=2)),
    ((1, 2, 1, 2), NodeBlock(dp=2)),
    ((1, 1, 2, 4), NodeBlock(row=2, col=2)),
    ((1, 1, 4, 2), NodeBlock(row=4)),
    ((1, 2, 2, 2), NodeBlock(dp=2, col=2)),
    ((2, 1, 2, 2), NodeBlock(pp=2, row=2)),
]


def axes_seen(sizes: Sizes, block: NodeBlock) -> Seen:
    """Return one rank's index on each axis, and the ranks that gathering over the axis brings."""
    axes = Axes.of(rank_grid(sizes, block), MESH_AXES, "cpu")
    mine = torch.tensor([dist.get_rank()])
    seen: Seen = {"world": (axes.world.index, list(range(axes.world.size)))}
    for name in MESH_AXES:
        axis = axes[name]
        if axis.size == 1:
            assert axis.group is None
            continue
        gathered = [torch.empty_like(mine) for _ in range(axis.size)]
        dist.all_gather(gathered, mine, group=axis.group)
        seen[name] = axis.index, [int(rank) for rank in gathered]
    return seen


@pytest.mark.parametrize(("sizes", "block"), PLACEMENTS, ids=str)
def test_axes_follow_the_blocks(pool: WorkerPool, sizes: Sizes, block: NodeBlock) -> None:
    ranks = rank_grid(sizes, block)
    n = ranks.numel()
    assert ranks.flatten().tolist() != list(range(n))
    results = pool.run(n, axes_seen, sizes, block)
    for rank, seen in enumerate(results):
        (place,) = (ranks == rank).nonzero().tolist()
        want: Seen = {"world": (rank, list(range(n)))}
        for axis, name in enumerate(MESH_AXES):
            if sizes[axis] > 1:
                here = [slice(None) if a == axis else at for a, at in enumerate(place)]
                want[name] = place[axis], ranks[tuple(here)].tolist()
        assert seen == want
