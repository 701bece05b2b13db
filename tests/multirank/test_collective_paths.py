"""Every collective, and a pipeline's messages, on both of their paths, gloo's and NCCL's.

NCCL's path runs over gloo; see tests/support/multirank/nccl_path.py.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gridformer import comm
from gridformer.comm import P2PChannel, Pending, collectives, p2p
from gridformer.config import LayoutConfig
from gridformer.mesh import Axis
from gridformer.parallel.data.copies import checksum
from gridformer.parallel.pipeline import LOADING_RUNS
from gridformer.utils.batch import Batch
from tests.support.marks import full_unless
from tests.support.multirank.cutting import grid_axes
from tests.support.multirank.exactness import TRAIN, axes_of, compare, worst_of
from tests.support.multirank.layouts import Layout
from tests.support.multirank.nccl_path import Over, on_both_paths, on_nccl
from tests.support.multirank.pipelines import LENGTH, family, reads_of, stepper_of
from tests.support.multirank.pool import WorkerPool


def contiguous(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def transposed(*shape: int) -> Tensor:
    return contiguous(*shape[::-1]).permute(*reversed(range(len(shape))))


def with_gaps(*shape: int) -> Tensor:
    """Return a part of a wider tensor."""
    return contiguous(*shape[:-1], shape[-1] + 2)[..., 1:-1]


def second_innermost(*shape: int) -> Tensor:
    """Return torch's channels_last layout, which torch.cat passes on to its results."""
    return contiguous(*shape[:1], *shape[2:], shape[1]).movedim(-1, 1)


LIES = [contiguous, transposed, with_gaps, second_innermost]


def shapes(n: int) -> list[tuple[int, ...]]:
    """Return shapes for n ranks; if they shard a dimension of n, a device has a width of 1."""
    return [(6, n), (n, 1), (n, 6), (2, 6, n), (6, 2, 1), (2, n, 3, 6)]


def everyones(n: int, make: Callable[..., Tensor], *shape: int) -> list[Tensor]:
    """Return what each rank has; every rank knows all of it."""
    torch.manual_seed(sum(shape))
    return [make(*shape) for _ in range(n)]


Collective = tuple[str, Callable[[], Tensor | Pending], Tensor]


def of_any_tensor(axis: Axis, xs: list[Tensor]) -> Iterator[Collective]:
    """Yield every collective that takes one tensor of any layout, with the result expected here."""
    here, n, mine = axis.index, axis.size, xs[axis.index]
    total = torch.stack(xs).sum(0)
    for start, reduce in ((False, comm.all_reduce), (True, comm.start_all_reduce)):
        yield f"all_reduce {start}", partial(reduce, mine.clone(), axis), total
        greatest = torch.stack(xs).amax(0)
        yield f"all_reduce max {start}", partial(reduce, mine.clone(), axis, "max"), greatest
    yield "all_gather of bool", partial(comm.all_gather, mine > 0, axis, -1), torch.cat(xs, -1) > 0
    for dim in range(-1, mine.dim()):
        whole = torch.cat(xs, dim)
        yield f"all_gather {dim}", partial(comm.all_gather, mine, axis, dim), whole
        yield f"start_all_gather {dim}", partial(comm.start_all_gather, mine, axis, dim), whole
        if mine.shape[dim] % n:
            continue
        block = total.chunk(n, dim)[here]
        yield f"reduce_scatter {dim}", partial(comm.reduce_scatter, mine, axis, dim), block
        started = partial(comm.start_reduce_scatter, mine, axis, dim)
        yield f"start_reduce_scatter {dim}", started, block
        if not axis.over_nccl:
            parts = mine.chunk(n, dim)
            yield f"sum of blocks {dim}", partial(_sum_of_blocks, [*parts], axis), block


def _sum_of_blocks(blocks: list[Tensor], axis: Axis) -> Pending:
    own = blocks.pop(axis.index)
    return comm.SumOfBlocks(blocks, axis, "").add(own)


def of_contiguous_ones(axis: Axis, xs: list[Tensor]) -> Iterator[Collective]:
    """Yield the in-place collectives, which require contiguous memory."""
    mine, total = xs[axis.index], torch.stack(xs).sum(0)
    for root in range(axis.size):
        for broadcast in (comm.broadcast, comm.start_broadcast):
            yield f"broadcast {root}", partial(broadcast, mine.clone(), axis, root), xs[root]
        for reduce in (comm.reduce, comm.start_reduce):
            if axis.index == root:
                yield f"reduce {root}", partial(reduce, mine.clone(), axis, root), total
            else:  # undefined on the other ranks
                meta = total.to("meta")
                yield f"reduce {root}", partial(_forgotten, reduce, mine.clone(), axis, root), meta


def _forgotten(reduce: Callable[..., Tensor | Pending], *args: Any) -> Tensor:
    out = reduce(*args)
    return (out.wait() if isinstance(out, Pending) else out).to("meta")


def all_collectives() -> int:
    """Check the result of each collective; return their number."""
    n_done = 0
    axis = grid_axes(1, dist.get_world_size()).col
    for make, shape in itertools.product(LIES, shapes(axis.size)):
        xs = everyones(axis.size, make, *shape)
        found = [*of_any_tensor(axis, xs)]
        if make is contiguous:
            found += of_contiguous_ones(axis, xs)
        for name, collective, want in found:
            case = f"{name} of {make.__name__} {shape}"
            try:
                got = collective()
                got = got.wait() if isinstance(got, Pending) else got
            except Exception as error:
                raise AssertionError(f"{case}: {error}") from error
            assert got.shape == want.shape, case
            assert got.is_meta or torch.allclose(got, want, rtol=1e-13, atol=1e-13), case
            n_done += 1
    return n_done


@pytest.mark.parametrize("n", [2, 3])
@on_both_paths
def test_a_collective_serves_any_tensor(pool: WorkerPool, n: int, over: Over) -> None:
    assert min(pool.run(n, *over, all_collectives)) > 400


def called(function: Callable[[], None]) -> tuple[bool, bool, bool]:
    """Return whether a function calls torch's all-gather, its reduce-scatter and its all-to-all."""
    with (
        patch.object(collectives, "_all_gather", wraps=collectives._all_gather) as gathered,
        patch.object(collectives, "_reduce_scatter", wraps=collectives._reduce_scatter) as cut,
        patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchanged,
    ):
        function()
    return gathered.called, cut.called, exchanged.called


def one_of_each() -> None:
    axis, x = grid_axes(1, 2).col, contiguous(4, 4)
    comm.all_gather(x, axis, 0)
    comm.reduce_scatter(x, axis, 0)


def test_the_two_paths_differ(pool: WorkerPool) -> None:
    assert pool.run(2, on_nccl, called, one_of_each) == [(True, True, False)] * 2
    assert pool.run(2, called, one_of_each) == [(False, False, True)] * 2


def started_at_once() -> None:
    """Start several collectives together, and wait for them in another order."""
    axis = grid_axes(1, dist.get_world_size()).col
    xs = everyones(axis.size, transposed, 6, 6)
    under_way = []
    for name, collective, want in of_any_tensor(axis, xs):
        if name.startswith(("start", "sum")) or name.endswith("True"):
            under_way.append((name, collective(), want))
    assert len(under_way) > 6
    for name, pending, want in reversed(under_way):
        assert isinstance(pending, Pending)
        assert torch.allclose(pending.wait(), want, rtol=1e-13, atol=1e-13), name
        assert pending.wait() is pending.wait()


@on_both_paths
def test_many_collectives_may_be_in_flight(pool: WorkerPool, over: Over) -> None:
    pool.run(3, *over, started_at_once)


# --------------------------------------------------- a width of 1

NARROW: list[dict[str, Any]] = [
    {"scheme": "optimus", "rows": 1, "cols": 2, "dp": 2},
    {"scheme": "optimus", "rows": 2, "cols": 2},
    {"scheme": "megatron", "cols": 2, "dp": 2, "sequence_parallel": True},
    {"scheme": "subgraph", "branches": 2, "dp": 2},
    {"scheme": "optimus", "rows": 1, "cols": 2, "schedule": "broadcast", "dp": 2},
    {"scheme": "optimus", "rows": 1, "cols": 2, "pp": 2, "micro_batches": 2},
]


@on_both_paths
@pytest.mark.parametrize(
    "layout",
    full_unless(lambda layout: layout in NARROW[:2], NARROW),
    ids=lambda layout: "-".join(map(str, layout.values())),
)
def test_a_device_may_hold_one_column(pool: WorkerPool, layout: dict[str, Any], over: Over) -> None:
    """A device may hold one column of weights and activations; copies are checked."""
    narrow = {"ffn_size": 2, "n_layers": 1, "max_seq_len": 12}
    arguments = (compare, layout, narrow, {**TRAIN, "dtype": "float64"}, 2)
    n = LayoutConfig(**layout).n_processes
    worst_of(pool.run(n, *over, *arguments))


@pytest.mark.parametrize("make", [transposed, with_gaps, contiguous])
@pytest.mark.parametrize("shape", [(5, 1), (1, 5), (5, 3)])
def test_a_checksum_is_of_values_alone(make: Callable[..., Tensor], shape: tuple[int, int]) -> None:
    """The checksum ignores memory layout, such as the strides of one-element columns."""
    x = make(*shape)
    same = torch.tensor(x.tolist(), dtype=x.dtype)
    assert checksum(x) == checksum(same)
    same[-1, -1] += 1e-9
    assert checksum(x) != checksum(same)


def test_the_checksum_of_a_large_table_takes_little_memory() -> None:
    """It has several pieces, and the last one is not full."""
    x = torch.arange(3_000_001, dtype=torch.int32)
    octets = x.view(torch.uint8).to(torch.int64)
    assert checksum(x) == (octets * (torch.arange(len(octets)) % 8191 + 1)).sum()
    sizes: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found = func(*args, **(kwargs or {}))
            if isinstance(found, Tensor) and found.dtype == torch.int64:
                sizes.append(found.numel())
            return found

    with Sizes():
        checksum(x)
    assert 0 < max(sizes) < x.nbytes / 2


def broadcast_of_a_kept_tensor() -> tuple[int, bool]:
    """Return how often the root's tensor counts as changed if a backend writes it there too."""
    axis = Axis("world", 2, dist.get_rank(), dist.group.WORLD)
    x = contiguous(3, 4)
    before, send = x._version, dist.broadcast

    def writing(x: Tensor, **how: Any) -> Any:
        work = send(x, **how)
        x.copy_(x.clone())  # as gloo does with a GPU's tensor
        return work

    with patch.object(dist, "broadcast", writing):
        got = comm.broadcast(x, axis, root=0)
    return x._version - before, got is x


def test_a_broadcast_does_not_change_the_roots_tensor_for_autograd(pool: WorkerPool) -> None:
    """Autograd refuses a backward pass that needs a tensor which was written since."""
    root, other = pool.run(2, broadcast_of_a_kept_tensor)
    assert root == (0, True)
    assert other[0] > 0


# --------------------------------------------------- pipelines

INTERLEAVED: Layout = {"pp": 4, "stages_per_rank": 2, "micro_batches": 8}
LAYOUTS: list[Layout] = [
    INTERLEAVED,
    {"pp": 4, "micro_batches": 6, "pipeline": "1f1b"},
    {"pp": 5, "micro_batches": 6, "pipeline": "1f1b"},
    {"pp": 2, "stages_per_rank": 3, "micro_batches": 4, "dp": 2},
]
N_LAYERS = 8  # enough stages for all layouts


def how(layout: Layout) -> tuple[Any, ...]:
    """Return what `compare` gets: a small GPT-2 with labels and dropout."""
    model = family("gpt2", n_layers=N_LAYERS).model_dump()
    return layout, {**model, "max_seq_len": LENGTH}, {**TRAIN, "dtype": "float64"}, 2


def name_of(layout: Layout) -> str:
    return "-".join(map(str, layout.values()))


@pytest.mark.parametrize(
    "layout", full_unless(lambda layout: layout == INTERLEAVED, LAYOUTS), ids=name_of
)
def test_equals_one_device(pool: WorkerPool, layout: Layout) -> None:
    worst_of(pool.run(LayoutConfig(**layout).n_processes, on_nccl, compare, *how(layout)))


@pytest.mark.parametrize("layout", [INTERLEAVED, LAYOUTS[1]], ids=name_of)
def test_messages_through_the_host_change_nothing(pool: WorkerPool, layout: Layout) -> None:
    compared = partial(on_nccl, loading_runs=99)
    worst_of(pool.run(LayoutConfig(**layout).n_processes, compared, compare, *how(layout)))


def sent_with_gaps() -> Tensor:
    """Send a column of a wider matrix to the next rank of a ring, and back."""
    axes = axes_of(LayoutConfig(pp=dist.get_world_size()))
    channel, here, n = P2PChannel(axes, ring=True), axes.pp.index, axes.pp.size
    ahead, back = torch.empty(4), torch.empty(4)
    coming = [channel.receive(ahead, (here - 1) % n), channel.receive(back, (here + 1) % n)]
    wide = (torch.arange(8.0) + 10 * here).view(4, 2)
    with patch.object(p2p, "isend", wraps=dist.isend) as isend:
        going = [channel.send(wide[:, 1], (here + 1) % n)]
        going.append(channel.send((-wide)[:, 1], (here - 1) % n))
    assert all(call.args[0].is_contiguous() for call in isend.call_args_list), "NCCL refuses gaps"
    for pending in (*coming, *going):
        pending.wait()
    return torch.stack((ahead, back))


@on_both_paths
def test_a_message_may_have_gaps(pool: WorkerPool, over: Over) -> None:
    for rank, (ahead, back) in enumerate(pool.run(3, *over, sent_with_gaps)):
        column = torch.tensor([1.0, 3.0, 5.0, 7.0])
        assert torch.equal(ahead, column + 10 * ((rank - 1) % 3))
        assert torch.equal(back, -column - 10 * ((rank + 1) % 3))


# --------------------------------------------------- deadlocks


def ways(layout: Layout) -> list[tuple[str, set[bool]]]:
    """Return for each of several runs whether its messages went through the host."""
    plan, config = LayoutConfig(**layout), family("gpt2", n_layers=4, n_labels=0)
    stepper = stepper_of(config, plan, axes_of(plan))
    (read,) = reads_of(config, 1)
    found: list[tuple[str, set[bool]]] = []

    def noted(x: Tensor, peer: int, group: Any) -> Any:
        found[-1][1].add(dist.get_process_group_ranks(group) == [*range(plan.n_processes)])
        return isend(x, peer, group=group)

    def words(rows: Any) -> Batch:
        return {key: x for key, x in read(rows).items() if key in ("tokens", "targets")}

    def half(rows: Any) -> Batch:
        return {key: x[:, : LENGTH // 2] for key, x in words(rows).items()}

    isend = dist.isend
    with patch.object(p2p, "isend", noted):
        for step in range(4):
            found.append(("train", set()))
            stepper(step, words)
        for _ in range(3):
            found.append(("evaluate", set()))
            stepper.evaluate([words])
        for _ in range(3):
            found.append(("half as long", set()))
            stepper.evaluate([half])
    return found


def test_while_kernels_are_loaded_messages_go_through_the_host(pool: WorkerPool) -> None:
    """A receive over NCCL would occupy the GPU, for which the loading of a kernel may wait."""
    layout: Layout = {"pp": 2, "dp": 2, "micro_batches": 2}
    on_device, through_host = {False}, {True}
    for found in pool.run(4, partial(on_nccl, loading_runs=LOADING_RUNS), ways, layout):
        of_kind: dict[str, list[set[bool]]] = {}
        for kind, seen in found:
            of_kind.setdefault(kind, []).append(seen)
        assert of_kind["train"] == [through_host, through_host, on_device, on_device]
        assert of_kind["evaluate"] in ([through_host] * 2 + [on_device], [set()] * 3)
        assert of_kind["half as long"] == of_kind["evaluate"]
    for found in pool.run(4, ways, layout):
        assert {True} not in [seen for _, seen in found], "gloo's are in the host's memory anyway"
