"""Samples move between any grids of processes and back; what a section sends is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gridformer import comm
from gridformer.mesh import Axis
from gridformer.mesh.node_placement import split_messages
from gridformer.models.branches import Branches
from gridformer.parallel.branches import Placed, parallelize_branches
from gridformer.parallel.branches.section import Columns, Grid, Section
from tests.support.multirank.exactness import CPU
from tests.support.multirank.pool import WorkerPool

# --------------------------------------------------------------------------- redistribution


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


# --------------------------------------------------------------------------- volumes


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
    """Count the split that really ran, for every number of processes per node."""
    results = pool.run(n, segmented, g, order, False, False)
    for k in range(1, n + 1):
        within = between = 0
        for rank, found in enumerate(results):
            targets = found[0]["targets"]
            near = sum(target // k == rank // k for target in targets)
            within, between = within + near, between + len(targets) - near
        found_of_k = split_messages(n, g, [k], order)  # type: ignore[arg-type]
        assert [within, between] == found_of_k, k


@pytest.mark.parametrize("order", ["topology", "contiguous"])
def test_messages_between_racks(pool: WorkerPool, order: str) -> None:
    """Count the split that really ran, for nodes of 2 processes and racks of 2 nodes."""
    n, g = 12, 6
    results = pool.run(n, segmented, g, order, False, False)
    counts = [0, 0, 0]
    for rank, found in enumerate(results):
        for target in found[0]["targets"]:
            far = (target // 2 != rank // 2) + (target // 4 != rank // 4)
            counts[far] += 1
    assert counts == split_messages(n, g, [2, 4], order)  # type: ignore[arg-type]
    assert counts[2] > 0


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
