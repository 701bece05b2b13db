"""How many calls create the process groups of a large run.

Over NCCL every such call is a collective of all ranks, and over gloo one of a group's members, so
their number may grow with axes, not with ranks.
One process plays a rank among up to 1,024, on torch's fake backend.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from gridformer.comm import P2PChannel
from gridformer.config import LayoutConfig
from gridformer.mesh import Axes
from gridformer.mesh.groups import objects_group
from gridformer.parallel.axes import build_axes
from tests.support.multirank.nccl_path import on_nccl

Call = tuple[str, list[list[int]]]  # a group's purpose, and the ranks of all groups made by a call

LIMIT_S = 3.0  # of processor time, for a rank of 1,024; it takes a small part of that
# Each has an axis of every kind, on 1,024 ranks; the same with two ranks along each axis is small.
LARGE: dict[str, dict[str, Any]] = {
    "grid": {"scheme": "optimus", "rows": 8, "cols": 8, "dp": 2, "pp": 8},
    "lines": {"scheme": "megatron", "cols": 4, "dp": 16, "pp": 16},
    "branches": {"scheme": "subgraph", "branches": 8, "dp": 16, "pp": 8},
}


def layout_of(name: str, small: bool) -> LayoutConfig:
    """Return a layout whose ranks have several stages each, so that the pipeline is a ring."""
    sizes = LARGE[name]
    if small:  # four along pp, because two neighbors are no ring
        least = {"pp": 4}
        sizes = {k: v if isinstance(v, str) else least.get(k, 2) for k, v in sizes.items()}
    return LayoutConfig(**sizes, stages_per_rank=2, micro_batches=32)


@contextmanager
def counted(rank: int, size: int) -> Iterator[list[Call]]:
    """Act as one rank of an NCCL group that is bound to its device, and list what creates groups.

    The fake backend cannot split a group, so this rank's group is made from scratch.
    """
    calls: list[Call] = []
    new_group = dist.new_group

    def made(ranks: Sequence[int]) -> ProcessGroup:
        with patch.object(ProcessGroup, "bound_device_id", None):
            return new_group([*ranks], backend="fake")

    def split_group(
        split_ranks: Sequence[Sequence[int]], group_desc: str, **_: Any
    ) -> ProcessGroup | None:
        calls.append((group_desc, [[*line] for line in split_ranks]))
        mine = [line for line in split_ranks if rank in line]
        assert len(mine) <= 1, "the lines of a call are disjoint"
        return made(mine[0]) if mine else None

    def one_group(ranks: Sequence[int] | None = None, **how: Any) -> ProcessGroup:
        calls.append((how["group_desc"], [[*(ranks or range(size))]]))
        return made(ranks or range(size))

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        with (
            patch.object(dist, "split_group", split_group),
            patch.object(dist, "new_group", one_group),
            patch.object(ProcessGroup, "bound_device_id", torch.device("cuda", 0)),
        ):
            yield calls
    finally:
        dist.destroy_process_group()


def everything(layout: LayoutConfig) -> Axes:
    """Create all groups of a run: axes, the pipeline's messages, shared parameters, objects."""
    axes = build_axes(layout, "cuda")
    P2PChannel(axes, ring=layout.pipeline_order == "interleaved")
    axes.make_holders([(0, layout.pp - 1)])
    objects_group()
    return axes


def calls_of(layout: LayoutConfig, rank: int) -> list[Call]:
    with counted(rank, layout.n_processes) as calls:
        began = time.process_time()
        axes = on_nccl(everything, layout)
        assert time.process_time() - began < LIMIT_S
        for name in ("pp", "dp", "row", "col", "branch"):
            assert axes[name].size == 1 or axes[name].ranks[axes[name].index] == rank
        if axes.pp.index in (ends := (0, layout.pp - 1)):
            assert axes.holders(ends).ranks[axes.holders(ends).index] == rank
    return calls


@pytest.mark.parametrize("name", LARGE)
def test_as_many_calls_create_the_groups_of_1024_ranks_as_of_a_few(name: str) -> None:
    small, large = (layout_of(name, small) for small in (True, False))
    assert (small.n_processes <= 32, large.n_processes) == (True, 1024)
    few, many = calls_of(small, 0), calls_of(large, 0)
    assert [purpose for purpose, _ in many] == [purpose for purpose, _ in few]
    for rank in (500, 1023):
        assert calls_of(large, rank) == many, "all ranks make the same calls"
    messages = [lines for purpose, lines in many if purpose in ("pp up", "pp down")]
    assert len(messages) == 4, "two sets of disjoint pairs of neighbors, in two directions"
    pairs = [tuple(pair) for lines in messages for pair in lines]
    lines = large.n_processes // large.pp
    assert len(pairs) == 2 * large.pp * lines, "each pair and direction has its own"


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("rank", [0, 500, 1023])
def test_a_rank_creates_only_its_own_groups_over_gloo(name: str, rank: int) -> None:
    """Each call of new_group costs every rank that makes it time, sockets and messages."""
    layout, made = layout_of(name, small=False), []
    new_group = dist.new_group

    def counted(ranks: Sequence[int], **how: Any) -> ProcessGroup:
        assert how["use_local_synchronization"]
        made.append(([*ranks], how["group_desc"]))
        group: ProcessGroup = new_group(ranks, **how)
        names.append(group.group_name)
        return group

    names: list[str] = []
    dist.init_process_group("fake", rank=rank, world_size=layout.n_processes, store=FakeStore())
    try:
        with patch.object(dist, "new_group", counted):
            everything(layout)
    finally:
        dist.destroy_process_group()
    assert all(rank in ranks for ranks, _ in made)
    # The axes, a grid or two together, and the pipeline's neighbors in two directions.
    assert len(made) <= 10
    assert len({*names}) == len(names)
