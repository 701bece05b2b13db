"""A device mesh whose nodes hold blocks has the groups and indices of rank_grid."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from gridformer.mesh import Axes
from gridformer.mesh.node_placement import MESH_AXES, NodeBlock, Sizes, rank_grid
from tests.support.multirank.pool import WorkerPool

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
