"""Process groups: all have the run's timeout, and few calls create them."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from gridformer import comm
from gridformer.checkpoint import checkpoint
from gridformer.comm import P2PChannel
from gridformer.comm.p2p import _pairs_apart
from gridformer.config import DataConfig, LayoutConfig, RunConfig, TrainConfig
from gridformer.mesh import Axes
from gridformer.parallel import build_parallel
from gridformer.parallel.axes import build_axes
from gridformer.train.step import Stepper
from tests.support.checkpoints import save_checkpoint
from tests.support.multirank.exactness import CPU, axes_of, tiny
from tests.support.multirank.layouts import Layout
from tests.support.multirank.nccl_path import Over, on_both_paths, on_nccl
from tests.support.multirank.pool import WorkerPool

GRID: Layout = {"scheme": "optimus", "rows": 2, "cols": 2, "pp": 2}
REPLICAS: Layout = {"scheme": "megatron", "cols": 2, "dp": 2, "pp": 2}
BRANCHES: Layout = {"scheme": "subgraph", "branches": 2, "dp": 2, "pp": 2}
PIPELINE: Layout = {"pp": 4, "dp": 2}
NAMES = ("pp", "dp", "row", "col", "grid", "branch", "dp_branch", "world")


def seconds_of(group: ProcessGroup | None) -> float:
    group = group or dist.group.WORLD
    assert group is not None
    timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return timeout.total_seconds()


def timeouts(layout: Layout) -> dict[str, float]:
    """Return the timeout in seconds of every group of a run whose default group has 1234."""
    world = dist.group.WORLD
    assert world is not None
    backend, usual = world._get_backend(torch.device("cpu")), seconds_of(None)
    backend._set_default_timeout(timedelta(seconds=1234))
    try:
        return timeouts_of(build_axes(LayoutConfig(**layout), "cpu"))
    finally:
        backend._set_default_timeout(timedelta(seconds=usual))


def timeouts_of(axes: Axes) -> dict[str, float]:
    found = {name: seconds_of(axes[name].group) for name in NAMES if axes[name].size > 1}
    if axes.pp.size == 4:
        axes.make_holders([(0, 3)])
        if axes.pp.index in (0, 3):
            found["holders"] = seconds_of(axes.holders((0, 3)).group)
    if axes.pp.size > 1:
        channel = on_nccl(P2PChannel, axes, ring=True)
        found |= {f"{a} to {b}": seconds_of(group) for (a, b), group in channel._groups.items()}
    return found


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        (GRID, {"pp", "row", "col", "grid", "world", "0 to 1", "1 to 0"}),
        (BRANCHES, {"pp", "dp", "branch", "dp_branch", "world", "0 to 1", "1 to 0"}),
        (
            PIPELINE,
            {"pp", "dp", "dp_branch", "world", "holders", "0 to 3", "3 to 0", "0 to 1", "1 to 0"},
        ),
    ],
    ids=["grid", "branches", "pipeline"],
)
def test_every_group_has_the_timeout(pool: WorkerPool, layout: Layout, names: set[str]) -> None:
    first, *rest = pool.run(LayoutConfig(**layout).n_processes, timeouts, layout)
    assert first.keys() == names
    for found in (first, *rest):
        assert set(found.values()) == {1234.0}


def devices_of(layout: Layout) -> list[bool]:
    """Return for each group whether it uses the gloo device of the default group."""
    # The pool, too, lets groups share a device.
    with patch.object(dist.distributed_c10d, "ProcessGroupGloo", dist.ProcessGroupGloo):
        axes = build_axes(LayoutConfig(**layout), "cpu")
    groups = [axes[name].group for name in NAMES if axes[name].size > 1]
    world, *found = [
        (group or dist.group.WORLD)._get_backend(torch.device("cpu")).options._devices  # type: ignore[union-attr]
        for group in (None, *groups)
    ]
    return [devices == world for devices in found]


def test_all_groups_use_one_gloo_device(pool: WorkerPool) -> None:
    """A device is a thread that wakes every 10 ms, which many groups would pay for."""
    layout = {"scheme": "optimus", "rows": 2, "cols": 2}
    assert pool.run(4, devices_of, layout) == [[True] * 4] * 4


# --------------------------------------------------- creation


def test_members_call_their_group_by_one_name(pool: WorkerPool) -> None:
    """Torch's own names depend on how many groups a rank is in. Reports of hangs go by names."""
    ranks = pool.run(8, split_over_nccl, PIPELINE, False)
    assert len(ranks[0]) > 4
    for number, (lines, *_) in enumerate(ranks[0]):
        names = [{ranks[rank][number][3] for rank in line} for line in lines]
        assert all(len(name) == 1 for name in names), names
        assert len(set().union(*names)) == len(lines)


def split_over_nccl(
    layout: Layout, ring: bool = True
) -> list[tuple[list[list[int]], float, str, str]]:
    """Return what is split off the default group if it is an NCCL group bound to its device.

    The last text is the name that torch would give to the group of this rank.
    """
    asked: list[tuple[list[list[int]], float, str, str]] = []
    torch_name = distributed_c10d._process_group_name

    def split_group(
        split_ranks: Sequence[Sequence[int]], timeout: timedelta, group_desc: str
    ) -> ProcessGroup | None:
        mine = next((line for line in split_ranks if rank in line), None)
        name = distributed_c10d._process_group_name(mine, True) if mine else ""
        lines = [[*line] for line in split_ranks]
        asked.append((lines, timeout.total_seconds(), group_desc, name))
        with (
            patch.object(type(world), "bound_device_id", None),
            patch.object(distributed_c10d, "_process_group_name", torch_name),
        ):
            made = [dist.new_group([*line]) for line in split_ranks]
        return next((group for group, line in zip(made, split_ranks) if rank in line), None)

    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None
    with (
        patch.object(dist, "split_group", split_group),
        patch.object(type(world), "bound_device_id", torch.device("cuda", 0)),
    ):
        axes = build_axes(LayoutConfig(**layout), "cpu")
        on_nccl(P2PChannel, axes, ring=ring)
        if not ring:  # the ranks of stages 0 and 1 are in different numbers of groups then
            axes.make_holders([(0, 1)])
    for axis in (axes.pp, axes.dp):
        assert comm.all_reduce(torch.ones(1), axis) == axis.size
        assert axis.ranks[axis.index] == rank
    return asked


def test_lines_of_an_axis_are_split_off_together(pool: WorkerPool) -> None:
    """NCCL splits all lines of an axis in one call, and a pipeline's disjoint neighbors too."""
    ranks = pool.run(8, split_over_nccl, PIPELINE)
    first, *rest = ([call[:3] for call in calls] for calls in ranks)
    assert all(asked == first for asked in rest), "groups must be asked for in one order"
    assert {seconds for _, seconds, _ in first} == {seconds_of_the_pool()}
    assert [(lines, name) for lines, _, name in first] == [
        ([[0, 2, 4, 6], [1, 3, 5, 7]], "pp"),
        ([[0, 1], [2, 3], [4, 5], [6, 7]], "dp"),
        *[([[0, 2], [1, 3], [4, 6], [5, 7]], f"pp {way}") for way in ("up", "down")],
        *[([[2, 4], [3, 5], [0, 6], [1, 7]], f"pp {way}") for way in ("up", "down")],
    ]


def seconds_of_the_pool() -> float:
    """Return torch's own timeout, which the pool does not change."""
    return dist.default_pg_timeout.total_seconds()


@pytest.mark.parametrize("n", range(2, 9))
@pytest.mark.parametrize("ring", [False, True])
def test_neighbors_are_paired_once(n: int, ring: bool) -> None:
    sets = _pairs_apart(n, ring)
    for pairs in sets:
        ranks = [rank for pair in pairs for rank in pair]
        assert len({*ranks}) == len(ranks), "groups that are made together share no rank"
        assert all(low < high for low, high in pairs)
    want = {(i, i + 1) for i in range(n - 1)} | ({(0, n - 1)} if ring else set())
    found = [pair for pairs in sets for pair in pairs]
    assert {*found} == want
    assert len(found) == len(want)
    assert len(sets) <= 2 + (ring and n % 2)


# --------------------------------------------------- objects


def groups_of_objects(out: Path) -> tuple[set[str], int]:
    """Save and load a checkpoint.

    Returns the groups over which objects travel, and how many groups are created meanwhile.
    """
    config, layout = tiny(n_layers=1), LayoutConfig(scheme="megatron", cols=2)
    axes = axes_of(layout)
    train = TrainConfig(global_batch=4)
    stepper = Stepper(build_parallel(config, layout, axes, 1, CPU), train, axes, layout)
    stepper.updates.allocate(0)
    run = RunConfig(model=config, layout=layout, data=DataConfig(path=out), train=train)
    used: set[str] = set()
    created = []

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            group = kwargs["group"]
            is_default = group in (None, dist.group.WORLD)
            used.add("default" if is_default else group.group_desc)
            return function(*args, **kwargs)

        return call

    def new_group(*args: Any, **kwargs: Any) -> Any:
        created.append(kwargs["group_desc"])
        return make(*args, **kwargs)

    make = dist.new_group
    names = ("gather_object", "all_gather_object", "scatter_object_list", "broadcast_object_list")
    with ExitStack() as stack:
        for name in (*names, "all_reduce"):
            stack.enter_context(patch.object(dist, name, watched(getattr(dist, name))))
        stack.enter_context(patch.object(dist, "new_group", new_group))
        folder = save_checkpoint(out, 1, 0, run, stepper.model, stepper.updates, axes)
        checkpoint.load(folder, stepper.model, stepper.updates, axes)
    return used, len(created)


@on_both_paths
def test_objects_never_go_over_nccl(pool: WorkerPool, tmp_path: Path, over: Over) -> None:
    for found in pool.run(2, *over, groups_of_objects, tmp_path):
        assert found == (({"objects"}, 1) if over else ({"default"}, 0))
