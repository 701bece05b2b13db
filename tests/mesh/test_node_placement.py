"""Blocks of the mesh on nodes: the formula for bytes into a node agrees with simulated rings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gridformer.config import LayoutConfig, RunConfig, divisors
from gridformer.mesh.node_placement import (
    MESH_AXES,
    Candidate,
    NodeBlock,
    Sizes,
    blocks,
    explain_racks,
    nodes_of,
    plain_block,
    rank_grid,
    search_blocks,
    search_racks,
    sizes_of,
)
from gridformer.parallel.fixes import Refusal
from gridformer.parallel.validation import problems
from tests.support.meshes import Traffic, cases, grid


def lines(ranks: Tensor, axis: int) -> list[list[int]]:
    """Return the ranks of every group of an axis, by coordinate."""
    by_line: list[list[int]] = ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist()
    return by_line


def simulated(ranks: Tensor, traffic: Traffic, devices_per_node: int) -> list[Traffic]:
    """Return the bytes into each node by axis, edge by edge of every group's ring in rank order."""
    n_nodes = math.ceil(ranks.numel() / devices_per_node)
    entered = [dict.fromkeys(MESH_AXES, 0) for _ in range(n_nodes)]
    for number, axis in enumerate(MESH_AXES):
        for line in lines(ranks, number):
            ring = sorted(line)
            for source, target in zip(ring, ring[1:] + ring[:1]):
                node = target // devices_per_node
                if source // devices_per_node != node:
                    entered[node][axis] += traffic[axis]
    return entered


@settings(max_examples=150)
@given(case=cases())
@example(case=(grid(4, 5), dict.fromkeys(MESH_AXES, 1), 4))  # the plain order is no block
@example(case=((2, 2, 4, 4), dict.fromkeys(MESH_AXES, 1), 8))
def test_bytes_into_every_node_are_those_of_simulated_rings(
    case: tuple[Sizes, Traffic, int],
) -> None:
    sizes, traffic, k = case
    for candidate in search_blocks(sizes, traffic, k):
        nodes = simulated(rank_grid(sizes, candidate.block), traffic, k)
        if candidate.block is None:
            assert max(sum(node.values()) for node in nodes) == candidate.total
            assert candidate.bytes_in in nodes
        else:
            assert nodes == [candidate.bytes_in] * len(nodes)
        assert {a: n * traffic[a] for a, n in candidate.receivers.items()} == candidate.bytes_in


@settings(max_examples=150)
@given(case=cases())
def test_ranks_of_a_node_are_a_block_and_rise_along_every_axis(
    case: tuple[Sizes, Traffic, int],
) -> None:
    sizes, _, k = case
    for block in blocks(sizes, k):
        ranks = rank_grid(sizes, block)
        assert ranks.shape == sizes
        assert ranks.dtype == torch.int64
        assert sorted(ranks.flatten().tolist()) == list(range(math.prod(sizes)))
        assert ranks[0, 0, 0, 0] == 0
        # torch sorts the members of a process group: rank order must be the order of coordinates
        for axis in range(4):
            assert all(line == sorted(line) for line in lines(ranks, axis))
        for node in range(math.prod(sizes) // block.n_devices):
            places = (ranks // block.n_devices == node).nonzero()
            lengths = places.max(0).values - places.min(0).values + 1
            assert tuple(lengths.tolist()) == block.extents
            in_node = ranks[tuple(places.T)]  # by coordinate, col innermost
            assert in_node.tolist() == list(range(in_node[0], in_node[0] + block.n_devices))


@settings(max_examples=150)
@given(case=cases())
def test_the_best_lets_in_the_fewest_bytes(case: tuple[Sizes, Traffic, int]) -> None:
    sizes, traffic, k = case
    found = search_blocks(sizes, traffic, k)
    totals = [candidate.total for candidate in found]
    assert totals == sorted(totals)
    every = {
        extents
        for extents in itertools.product(*(divisors(size) for size in sizes))
        if math.prod(extents) == k
    } or {sizes}
    assert {c.block.extents for c in found if c.block} == every
    in_order = rank_grid(sizes, None)
    plain = max(sum(node.values()) for node in simulated(in_order, traffic, k))
    assert totals[0] <= plain
    (as_found,) = [c for c in found if c.block == plain_block(sizes, k)]
    assert as_found.total == plain
    assert torch.equal(rank_grid(sizes, as_found.block), in_order)


def partitions(devices: tuple[int, ...], k: int) -> Iterator[list[set[int]]]:
    """Yield every way to put devices on nodes of k each."""
    if not devices:
        yield []
        return
    for others in itertools.combinations(devices[1:], k - 1):
        node = {devices[0], *others}
        for rest in partitions(tuple(d for d in devices if d not in node), k):
            yield [node, *rest]


@pytest.mark.parametrize(
    ("sizes", "k"),
    [
        (grid(2, 2), 2),
        (grid(2, 3), 2),
        (grid(3, 2), 3),
        (grid(2, 4), 2),
        (grid(2, 4), 4),
        (grid(3, 3), 3),
        ((1, 2, 2, 2), 2),
        ((2, 1, 2, 2), 4),
    ],
)
def test_no_other_way_to_fill_nodes_is_better(sizes: Sizes, k: int) -> None:
    """Other placements, whose rings visit a node's members in sequence, are no better."""
    ranks = rank_grid(sizes, None)
    groups = [[set(line) for line in lines(ranks, axis)] for axis in range(4)]
    amounts = (0, 1, 2, 3, 5)
    fewest = dict.fromkeys(itertools.product(amounts, repeat=2), math.inf)
    # Two axes carry the two amounts; a third, dp or pp, carries as much as the rows.
    for nodes in partitions(tuple(range(math.prod(sizes))), k):
        entered = [
            [sum(1 for line in lines_ if line & node and not line <= node) for lines_ in groups]
            for node in nodes
        ]
        for a, b in fewest:
            most = max(a * (pp + dp + row) + b * col for pp, dp, row, col in entered)
            fewest[a, b] = min(fewest[a, b], most)
    for (a, b), total in fewest.items():
        assert search_blocks(sizes, {"pp": a, "dp": a, "row": a, "col": b}, k)[0].total == total


# --------------------------------------------------------------------------- racks


@settings(max_examples=100)
@given(case=cases(), racks=st.integers(1, 6))
@example(case=(grid(8, 8), dict.fromkeys(MESH_AXES, 1), 4), racks=4)
def test_bytes_into_every_rack_are_those_of_simulated_rings(
    case: tuple[Sizes, Traffic, int], racks: int
) -> None:
    """Rings of devices in rank order, with as many bytes a device, enter racks as is foretold."""
    sizes, traffic, k = case
    for candidate in search_blocks(sizes, traffic, k)[:3]:
        if candidate.block is None:
            assert search_racks(sizes, candidate, racks) == []
            continue
        n_nodes = math.prod(nodes_of(sizes, candidate.block))
        in_rack = max(d for d in divisors(n_nodes) if d <= racks)
        found = search_racks(sizes, candidate, in_rack)
        assert found[0].total == min(rack.total for rack in found)
        for rack in found:
            if rack.block is None:
                continue
            ranks = rank_grid(sizes, replace(candidate.block, rack=rack.block))
            assert sorted(ranks.flatten().tolist()) == list(range(math.prod(sizes)))
            for axis in range(4):
                assert all(line == sorted(line) for line in lines(ranks, axis))
            # A node is what it is without racks, and what enters a rack is what is foretold.
            per_node = candidate.block.n_devices
            assert simulated(ranks, traffic, per_node) == [candidate.bytes_in] * n_nodes
            entered = simulated(ranks, traffic, per_node * in_rack)
            assert entered == [rack.bytes_in] * (n_nodes // in_rack)


def test_racks_are_squares_of_squares() -> None:
    sizes = grid(16, 16)
    best_node = search_blocks(sizes, {"row": 100, "col": 100}, 4)[0]
    found = search_racks(sizes, best_node, 4)
    assert found[0].block == NodeBlock(row=2, col=2)  # 2x2 nodes of 2x2 devices
    assert found[0].total == 800  # 4 rings of rows and 4 of columns enter 4x4 devices
    assert found[-1].total == 1000  # 2x8 devices: 8 columns enter, and 2 rows
    block = replace(NodeBlock(row=2, col=2), rack=NodeBlock(row=2, col=2))
    assert rank_grid(sizes, block)[0, 0, :4, :4].tolist() == [
        [0, 1, 4, 5],
        [2, 3, 6, 7],
        [8, 9, 12, 13],
        [10, 11, 14, 15],
    ]
    assert rank_grid(sizes, block)[0, 0, 0, :8].tolist() == [0, 1, 4, 5, 16, 17, 20, 21]
    assert "A rack of 4 nodes holds 4x4 of the grid" in explain_racks(found, block, sizes, 4)


def test_numbers_of_nodes_that_do_not_divide_are_refused() -> None:
    def said(k: int, racks: int) -> list[str]:
        layout = plan(4, 4, 1, k).model_copy(update={"nodes_per_rack": racks})
        return [str(one) for one in of_nodes(layout, "nodes_per_rack")]

    assert said(4, 2) == said(4, 4) == said(4, 9) == said(2, 0) == []
    (only,) = said(4, 3)
    assert "does not divide the number of nodes, 4" in only
    (only,) = said(0, 2)
    assert "needs layout.devices_per_node" in only


# --------------------------------------------------------------------------- known answers


def best(sizes: Sizes, devices_per_node: int, **traffic: int) -> Candidate:
    return search_blocks(sizes, traffic, devices_per_node)[0]


@pytest.mark.parametrize("n", [4, 8, 16])
def test_square_grid_is_bunched(n: int) -> None:
    """In Xu et al. 2021, figure 8, nodes hold 2x2; 2 of 4 devices share the cable."""
    found = search_blocks(grid(n, n), {"row": 100, "col": 100}, 4)
    assert found[0].block == NodeBlock(row=2, col=2)
    assert found[0].bytes_in == {"pp": 0, "dp": 0, "row": 200, "col": 200}
    assert found[0].sharing == 2
    (strip,) = [c for c in found if c.block == NodeBlock(col=4)]
    assert strip.sharing == 4
    assert strip.total == (400 if n == 4 else 500)  # on 4x4 a strip is a whole row


@pytest.mark.parametrize(
    ("sizes", "k", "traffic", "block"),
    [
        # strips where one axis dominates
        (grid(4, 4), 4, {"row": 10, "col": 100}, NodeBlock(col=4)),
        (grid(4, 4), 4, {"row": 100, "col": 10}, NodeBlock(row=4)),
        (grid(8, 8), 4, {"row": 10, "col": 100}, NodeBlock(col=4)),
        (grid(16, 16), 8, {"row": 100, "col": 10}, NodeBlock(row=8)),
        (grid(16, 16), 16, {"row": 100, "col": 100}, NodeBlock(row=4, col=4)),
        # tensor-parallel ranks move the most, then replicas, then stages (Narayanan et al. 2021)
        ((2, 4, 1, 8), 8, {"pp": 2, "dp": 10, "col": 100}, NodeBlock(col=8)),
        ((2, 4, 1, 4), 8, {"pp": 2, "dp": 10, "col": 100}, NodeBlock(dp=2, col=4)),
        ((2, 4, 1, 2), 16, {"pp": 2, "dp": 10, "col": 100}, NodeBlock(pp=2, dp=4, col=2)),
        # gradients are what moves
        ((1, 4, 2, 2), 4, {"dp": 100, "row": 1, "col": 1}, NodeBlock(dp=4)),
    ],
)
def test_the_best_block(sizes: Sizes, k: int, traffic: dict[str, int], block: NodeBlock) -> None:
    assert best(sizes, k, **traffic).block == block


def test_equal_blocks_are_ordered_by_how_long_their_rows_are() -> None:
    """2x4 and 4x2 let in equally many bytes; 2x4's longer rows are closer to plain order."""
    found = search_blocks(grid(16, 16), {"row": 100, "col": 100}, 8)
    assert [c.block for c in found[:2]] == [NodeBlock(row=2, col=4), NodeBlock(row=4, col=2)]
    assert [c.total for c in found] == [600, 600, 900, 900]


def test_plain_order_where_all_is_equal() -> None:
    for sizes, k in [(grid(4, 4), 4), ((2, 2, 2, 2), 8), ((1, 6, 1, 1), 2)]:
        quiet = best(sizes, k)
        assert quiet.block == plain_block(sizes, k)
        assert (quiet.total, quiet.sharing) == (0, 0)


def test_plain_order_is_kept_where_it_beats_every_block() -> None:
    """With rows of 5 on nodes of 4, the only block is a whole column, and it splits every row."""
    found = search_blocks(grid(4, 5), {"row": 1, "col": 100}, 4)
    assert [c.block for c in found] == [None, NodeBlock(row=4)]
    assert [c.total for c in found] == [204, 400]
    assert torch.equal(rank_grid(grid(4, 5), None), torch.arange(20).view(1, 1, 4, 5))


def test_fewer_devices_than_a_node_holds() -> None:
    (only,) = search_blocks((1, 1, 2, 3), {"row": 5, "col": 5}, 8)
    assert only.block == NodeBlock(row=2, col=3)
    assert only.total == 0


def test_plain_block() -> None:
    assert plain_block(grid(4, 4), 4) == NodeBlock(col=4)
    assert plain_block(grid(4, 4), 8) == NodeBlock(row=2, col=4)
    assert plain_block(grid(4, 8), 4) == NodeBlock(col=4)
    assert plain_block((2, 2, 2, 2), 8) == NodeBlock(dp=2, row=2, col=2)
    assert plain_block(grid(2, 3), 2) is None
    assert plain_block(grid(3, 4), 6) is None
    assert plain_block(grid(2, 3), 9) == NodeBlock(row=2, col=3)


def test_rank_grid() -> None:
    ranks = rank_grid((1, 2, 2, 2), NodeBlock(dp=2, col=2))[0].tolist()
    assert ranks == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_description_of_a_block() -> None:
    assert NodeBlock(row=2, col=4).describe((1, 2, 4, 4)) == "2x4 of the grid"
    assert NodeBlock(dp=2, col=2).describe((1, 2, 4, 4)) == "dp 2 x 1x2"
    assert NodeBlock(pp=2, dp=4).describe((4, 4, 1, 1)) == "pp 2 x dp 4"
    assert NodeBlock().describe((1, 8, 1, 1)) == "1 device"


def test_axes_are_those_of_the_mesh() -> None:
    layout = LayoutConfig(scheme="optimus", rows=2, cols=3, dp=4, pp=5)
    assert dict(zip(MESH_AXES, sizes_of(layout))) == {"pp": 5, "dp": 4, "row": 2, "col": 3}


# --------------------------------------------------------------------------- problems


def plan(n_rows: int, n_cols: int, dp: int, devices_per_node: int) -> LayoutConfig:
    return LayoutConfig(
        scheme="optimus", rows=n_rows, cols=n_cols, dp=dp, devices_per_node=devices_per_node
    )


def of_nodes(layout: LayoutConfig, rule: str = "devices_per_node") -> list[Refusal]:
    """Return the problems of a layout's nodes, or racks, only."""
    run = {"model": {"n_layers": 1, "hidden_size": 8, "n_heads": 2}, "data": {"path": "x"}}
    found = problems(RunConfig.model_validate({**run, "layout": layout}))
    return [problem for problem in found if problem.rule == rule]


def test_node_sizes_that_do_not_divide_are_refused() -> None:
    (only,) = of_nodes(plan(2, 2, 1, 3))
    assert str(only) == (
        "layout.devices_per_node=3 does not divide rows x cols x dp x pp=4: use "
        "layout.devices_per_node=1, 2 or 4"
    )
    (only,) = of_nodes(plan(6, 8, 2, 7))
    assert str(only).endswith("use layout.devices_per_node=4, 6 or 8")


@settings(max_examples=200)
@given(
    n_rows=st.integers(1, 9),
    n_cols=st.integers(1, 9),
    dp=st.integers(1, 4),
    devices_per_node=st.integers(0, 40),
)
def test_a_layout_without_problems_has_a_block(
    n_rows: int, n_cols: int, dp: int, devices_per_node: int
) -> None:
    layout = plan(n_rows, n_cols, dp, devices_per_node)
    found = of_nodes(layout)
    if not found:
        assert devices_per_node == 0 or blocks(sizes_of(layout), devices_per_node)
        return
    assert not blocks(sizes_of(layout), devices_per_node)
    for offer in found[0].changes:
        assert offer.keys() == {"layout.devices_per_node"}
