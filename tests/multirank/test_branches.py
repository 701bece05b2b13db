"""Networks with branch sections on sub-grids train exactly as one process.

Outputs and every gradient are compared, for any grids and any number of samples.
"""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gridformer import comm
from gridformer.mesh import Axis
from gridformer.mesh.node_placement import split_messages
from gridformer.models.branches import Branches
from gridformer.parallel.branches import Placed, parallelize_branches
from gridformer.parallel.branches.network import assign
from gridformer.parallel.branches.section import Columns, Grid, Section
from tests.support.multirank.exactness import CPU
from tests.support.multirank.networks import TwoTowers, batch, build, compare, worse
from tests.support.multirank.pool import RankFailed, WorkerPool

# --------------------------------------------------- against one process


def check(pool: WorkerPool, n: int, name: str, how: dict[str, Any], sizes: list[int]) -> list[int]:
    results = pool.run(n, compare, name, how, sizes)
    for rank, worst in enumerate(results):
        wrong = {k: v for k, v in worst.items() if k != "held" and not v <= 1e-12}
        assert not wrong, f"rank {rank}: {wrong}"
    return [int(worst["held"]) for worst in results]


CASES: list[tuple[int, str, dict[str, Any]]] = [
    (2, "towers", {"g": 2, "common": "first"}),
    (4, "towers", {"g": 2}),
    (4, "towers", {"g": 2, "common": "first", "order": "contiguous"}),
    (4, "resnext", {"g": 4}),
    (4, "resnext", {"g": 2, "order": "contiguous"}),
    (4, "resnext", {"g": 4, "common": "first"}),
    (4, "nested", {"g": {"first": 4, "outer": 2, "joined": 2, "outer.*.0": 2}}),
    (4, "nested", {"g": {"first": 2, "outer": 2, "outer.*": 1, "joined": 3}, "common": "first"}),
    (4, "uneven", {"g": {"front": 4, "slices": 3}}),
    (4, "uneven", {"g": 2, "common": [1, 2, 3]}),
    (5, "towers", {"g": 2}),
    (5, "nested", {"g": 2, "common": [3]}),
    (5, "uneven", {"g": 3, "common": "first"}),
    (6, "nested", {"g": {"first": 3, "outer": 2, "outer.branches.0.0": 3}, "order": "contiguous"}),
]


@pytest.mark.parametrize(("n", "name", "how"), CASES, ids=lambda value: "".join(str(value).split()))
def test_equals_one_process(pool: WorkerPool, n: int, name: str, how: dict[str, Any]) -> None:
    """One batch divides, two do not, and one leaves processes without samples."""
    check(pool, n, name, how, [12 if n != 5 else 10, 7, 13, 3])


def test_a_branch_is_held_by_its_sub_grid_alone(pool: WorkerPool) -> None:
    """Branch sections take exactly 1/g of the memory; common layers are held once or not at all."""
    whole_net = build("resnext")
    common = sum(p.numel() for name, p in whole_net.named_parameters() if "branches" not in name)
    inside = sum(p.numel() for p in whole_net.parameters()) - common
    assert inside % 4 == 0
    assert check(pool, 4, "resnext", {"g": 4}, [8]) == [common + inside // 4] * 4
    held = check(pool, 4, "resnext", {"g": 4, "common": "first"}, [8])
    assert held == [common + inside // 4] + [inside // 4] * 3
    assert check(pool, 4, "resnext", {"g": 2}, [8]) == [common + inside // 2] * 4


def alive_after_placing(g: int) -> list[bool]:
    """Return for each path of a block whether its weights are still in memory."""
    net = build("resnext")
    weights = [weakref.ref(path.conv.weight) for path in net.blocks[0].paths.branches.values()]  # type: ignore[union-attr,index]
    placed = parallelize_branches(net, g)
    gc.collect()
    assert placed.model is net
    return [weight() is not None for weight in weights]


def test_other_sub_grids_branches_leave_memory(pool: WorkerPool) -> None:
    for rank, alive in enumerate(pool.run(4, alive_after_placing, 4)):
        assert alive == [branch == rank for branch in range(4)]


@pytest.mark.parametrize("network", [nn.Linear(3, 3), nn.Sequential(), torch.tanh])
def test_what_has_no_branches_is_refused(network: Any) -> None:
    with pytest.raises(TypeError, match=r"into gridformer\.models\.branches\.Branches"):
        parallelize_branches(network, 1)


def test_slices_must_fit() -> None:
    with pytest.raises(ValueError, match=r"sizes \(5, 4\) add up to 9, not to 8"):
        build("towers").towers(torch.zeros(2, 8))  # type: ignore[operator]
    section = Branches([nn.Identity(), nn.Identity()], "slice")
    with pytest.raises(ValueError, match="7 does not divide into 2 equal slices: give sizes"):
        section(torch.zeros(2, 7))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"dim": 0}, "dim=0 holds samples"),
        ({"enter": "slices"}, "enter must be 'split' or 'slice'"),
        ({"sizes": (1, 2)}, "sizes need enter"),
        ({"enter": "slice", "sizes": (1,)}, "1 sizes for 2 branches"),
        ({"costs": (1.0, -1.0)}, "must not be negative"),
    ],
)
def test_what_a_section_cannot_be(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Branches([nn.Identity(), nn.Identity()], **arguments)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=12), st.lists(st.integers(1, 4), min_size=1))
def test_lpt_gives_every_branch_away_and_every_sub_grid_some(
    costs: list[float], sizes: list[int]
) -> None:
    sizes = sizes[: len(costs)]
    held = assign(costs, sizes)
    assert sorted(branch for branches in held for branch in branches) == [*range(len(costs))]
    assert all(held)
    if len(set(sizes)) == 1:  # Graham's bound, with the optimum bounded from below
        work = [sum(costs[branch] for branch in branches) for branches in held]
        assert max(work) <= sum(costs) / len(sizes) + max(costs) + 1e-9


def test_lpt_by_example() -> None:
    assert assign([5, 4, 3, 3, 3], [1, 1]) == [[0, 3], [1, 2, 4]]
    assert assign([6, 3, 3], [2, 1]) == [[0, 2], [1]], "twice the processes, half the time"


# --------------------------------------------------- refusals


def refused(how: dict[str, Any], seed_by_rank: bool = False) -> str:
    torch.manual_seed(dist.get_rank() if seed_by_rank else 0)
    try:
        parallelize_branches(TwoTowers(), **how)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"g": 3}, "section towers: 2 branches cannot occupy 3 sub-grids: use at most 2"),
        ({"g": 8}, "section towers: 4 processes cannot form 8 sub-grids: use 1 to 4"),
        ({"g": 2, "common": [0, 7]}, "the ranks must be in 0 to 3"),
        ({"g": {"tower": 2}}, "'tower' in g matches no branch section: did you mean 'towers'?"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    pool: WorkerPool, how: dict[str, Any], says: str
) -> None:
    for sentence in pool.run(4, refused, how):
        assert says in sentence


def test_different_weights_are_refused(pool: WorkerPool) -> None:
    for sentence in pool.run(2, refused, {"g": 2}, True):
        assert "the processes' weights differ: common.weight" in sentence
        assert "torch.manual_seed" in sentence


def sharing(g: int, with_common: bool) -> str:
    shared = nn.Linear(3, 3)
    front = shared if with_common else nn.Identity()
    second = nn.Linear(3, 3) if with_common else shared
    try:
        parallelize_branches(nn.Sequential(front, Branches([second, shared])), g, "first")
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("with_common", [False, True])
def test_weights_shared_by_different_processes_are_refused(
    pool: WorkerPool, with_common: bool
) -> None:
    for sentence in pool.run(2, sharing, 2, with_common):
        assert "a weight is shared by modules that go to different processes" in sentence
    assert pool.run(2, sharing, 1, with_common) == ["accepted"] * 2


def clipped(how: dict[str, Any]) -> tuple[float, float, float]:
    """Return the norms before clipping on many processes and one, and the difference after."""
    want, placed = build("nested"), parallelize_branches(build("nested"), **how)
    x, y = batch("nested", 12, 0)
    F.cross_entropy(want(x), y, reduction="sum").backward()
    norm = float(torch.nn.utils.clip_grad_norm_(want.parameters(), 0.5))
    placed.backward(
        F.cross_entropy(placed.model(placed.local(x)), placed.local(y), reduction="sum")
    )
    found = placed.clip_gradients(0.5)
    reference, worst = dict(want.named_parameters()), 0.0
    for key, p in placed.model.named_parameters():
        if not p.is_meta:
            assert p.grad is not None
            worst = worse(worst, p.grad, reference[key].grad)
    return found, norm, worst


@pytest.mark.parametrize("common", ["all", "first"])
def test_the_norm_counts_every_weight_once(pool: WorkerPool, common: str) -> None:
    how = {"g": {"first": 2, "outer": 2, "outer.*": 2}, "common": common}
    for found, norm, worst in pool.run(4, clipped, how):
        assert norm > 0.5
        assert found == pytest.approx(norm, rel=1e-12)
        assert worst < 1e-12


def forgot_local() -> None:
    placed = parallelize_branches(build("towers"), g=2)
    x, _ = batch("towers", 8, 0)
    placed.local(x)
    placed.model(x)  # all of the batch instead of this process's samples


def test_a_batch_that_was_not_divided_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(RankFailed, match="with 8 samples but holds 4 of 8"):
        pool.run(2, forgot_local)


# --------------------------------------------------- between grids

# --------------------------------------------------- redistribution


def sent_around(
    source: list[int], grids: list[list[int]], n_samples: int, sliced: bool
) -> dict[str, Any]:
    """Send numbered samples to the sub-grids and back; return what this rank saw and sent."""
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = tuple(Grid(tuple(ranks)) for ranks in grids)
    section = Section(Grid(tuple(source)), parts, rank, Axis("world", size, rank), CPU)
    columns = None
    if sliced:
        columns = Columns(-1, 2 * len(grids), [[(2 * y, 2 * y + 2)] for y in range(len(grids))])
    width = columns.total if columns else 3
    every = torch.arange(n_samples * width, dtype=torch.float64).view(n_samples, width)
    x = every[[*section.source.samples(rank, n_samples)]] if section.on_source else None
    x = every.to("meta") if x is None else x
    with comm.record_messages() as record:
        inside = section.spread(x, columns, n_samples)
    back = section.collect(inside, columns, n_samples)
    return {"inside": inside, "back": None if back.is_meta else back, "moved": record.moved()}


@st.composite
def grids(draw: st.DrawFn, n: int) -> tuple[list[int], list[list[int]]]:
    """Draw some of n ranks as the source and all of them as sub-grids, in any order."""
    ranks = draw(st.permutations(range(n)))
    cuts = sorted(draw(st.sets(st.integers(1, n - 1), max_size=n - 1)))
    parts = [[*ranks[a:b]] for a, b in zip([0, *cuts], [*cuts, n])]
    source = draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True))
    return source, parts


@settings(max_examples=25)
@given(data=st.data(), n_samples=st.integers(1, 17), sliced=st.booleans())
def test_redistribution_between_any_grids(
    pool: WorkerPool, data: st.DataObject, n_samples: int, sliced: bool
) -> None:
    """Every sample arrives where it belongs and comes back, and nothing travels twice."""
    n = 6
    source, parts = data.draw(grids(n))
    width = 2 * len(parts) if sliced else 3
    every = torch.arange(n_samples * width, dtype=torch.float64).view(n_samples, width)
    results = pool.run(n, sent_around, source, parts, n_samples, sliced)
    for y, part in enumerate(parts):
        columns = every[:, 2 * y : 2 * y + 2] if sliced else every
        for rank in part:
            inside = columns[part.index(rank) :: len(part)]
            assert torch.equal(results[rank]["inside"], inside)
    for number, rank in enumerate(source):
        back = every[number :: len(source)] * (1 if sliced else len(parts))
        assert torch.equal(results[rank]["back"], back)
    for rank in range(n):
        mine = next(part for part in parts if rank in part)
        held = set(range(source.index(rank), n_samples, len(source))) if rank in source else set()
        wanted = set(range(mine.index(rank), n_samples, len(mine)))
        received = len(wanted - held) * (2 if sliced else 3)
        sent = 0
        for part in parts:
            for other in part:
                there = set(range(part.index(other), n_samples, len(part)))
                sent += len(there & held) * (2 if sliced else 3) * (other != rank)
        assert results[rank]["moved"] == max(sent, received)


# --------------------------------------------------- volumes


def segmented(g: int, order: str, first: bool, sliced: bool) -> list[dict[str, Any]]:
    """Return elements, kinds and targets of a section's four collectives on this rank."""
    n, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(
        Branches([nn.Identity() for _ in range(g)], *(("slice", "concat") if sliced else ()))
    )
    common = "first" if first else "all"
    placed: Placed = parallelize_branches(net, g, common, order)  # type: ignore[arg-type]
    x = torch.ones(4 * n, 5, 2 * g)
    local = placed.local(x).requires_grad_()
    placed.model(local)  # computes the widths, once
    found = []
    with comm.record_messages() as record:
        y = placed.model(local)
    with comm.record_messages() as back:
        y.backward(torch.ones_like(y))
    for recorder in (record, back):
        for r in recorder.records:
            found.append({"op": r.op, "moved": r.moved, "targets": r.targets, "rank": rank})
    return found


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("n", "g"), [(4, 2), (4, 4), (6, 3)])
def test_segmented_collectives_send_the_least(
    pool: WorkerPool, n: int, g: int, first: bool, sliced: bool
) -> None:
    """Each of the four collectives moves the elements that docs/concepts/subgraph.md states."""
    results = pool.run(n, segmented, g, "topology", first, sliced)
    m = n // g
    every = 4 * n * 5 * 2 * g  # elements of the whole batch
    if first:
        ops = ["scatter", "gather", "scatter", "gather"] if sliced else None
        ops = ops or ["broadcast", "reduce", "broadcast", "reduce"]
    else:
        ops = ["all_to_all"] * 4 if sliced else None
        ops = ops or ["all_gather", "reduce_scatter", "all_gather", "reduce_scatter"]
    for rank, found in enumerate(results):
        # Backward runs the sum's half first: its partner is the split.
        assert [record["op"] for record in found] == ops
        # this process's part of the common part, if it holds one
        mine = every // (m if first else n)
        root = first and rank % g == 0
        if first and sliced:
            want = mine * (g - 1) // g if root else mine // g
        elif first:
            want = 0 if root else mine
        elif sliced:
            want = mine * (g - 1) // g
        else:
            want = mine * (g - 1)
        assert {record["moved"] for record in found} == {want}, rank


@pytest.mark.parametrize("order", ["topology", "contiguous"])
@pytest.mark.parametrize(("n", "g"), [(4, 2), (8, 2), (8, 4), (12, 3), (12, 6), (16, 4)])
def test_messages_between_nodes(pool: WorkerPool, n: int, g: int, order: str) -> None:
    """Count the split that really ran, for every number of processes per node, and for racks."""
    results = pool.run(n, segmented, g, order, False, False)
    for k in range(1, n + 1):
        within = between = 0
        for rank, found in enumerate(results):
            targets = found[0]["targets"]
            near = sum(target // k == rank // k for target in targets)
            within, between = within + near, between + len(targets) - near
        found_of_k = split_messages(n, g, [k], order)  # type: ignore[arg-type]
        assert [within, between] == found_of_k, k
    counts = [0, 0, 0]  # in nodes of 2 processes, racks of 2 nodes, and beyond
    for rank, found in enumerate(results):
        for target in found[0]["targets"]:
            counts[(target // 2 != rank // 2) + (target // 4 != rank // 4)] += 1
    assert counts == split_messages(n, g, [2, 4], order)  # type: ignore[arg-type]


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6))
def test_the_table_of_messages(a: int, b: int, c: int) -> None:
    """The message counts of docs/concepts/subgraph.md hold for any n, g and k that fit.

    k must divide n, and one of k and a group's span (topology-aware: g; contiguous: n/g) must
    divide the other.
    """
    for g, m, k in ((a, b * c, a), (a * b, c, a), (a, b * c, a * b), (a, b * c, b), (a, b, b * a)):
        n = g * m
        if n % k:
            continue
        if m % k == 0 or k % m == 0:
            want = (n, n * (g - 1)) if m >= k else (k * g, (n - k) * g)
            assert split_messages(n, g, [k], "contiguous") == [*want]
        if g % k == 0 or k % g == 0:
            want = (n * g, 0) if g <= k else (n * k, n * (g - k))
            assert split_messages(n, g, [k], "topology") == [*want]
