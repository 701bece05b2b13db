"""Blocks of the mesh on nodes: the formula for bytes into a node agrees with simulated rings."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gridformer.config import divisors
from gridformer.mesh.node_placement import (
    MESH_AXES,
    Candidate,
    NodeBlock,
    Sizes,
    blocks,
    explain,
    explain_racks,
    nodes_of,
    plain_block,
    rank_grid,
    search_blocks,
    search_racks,
)
from tests.support.meshes import MIB, Traffic, cases, grid


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


def test_plain_order_is_kept_where_it_beats_every_block() -> None:
    """With rows of 5 on nodes of 4, the only block is a whole column, and it splits every row."""
    found = search_blocks(grid(4, 5), {"row": 1, "col": 100}, 4)
    assert [c.block for c in found] == [None, NodeBlock(row=4)]
    assert [c.total for c in found] == [204, 400]
    assert torch.equal(rank_grid(grid(4, 5), None), torch.arange(20).view(1, 1, 4, 5))


# --------------------------------------------------------------------------- explanations


def test_explanation_of_a_bunched_grid() -> None:
    sizes, traffic = grid(8, 8), {"row": 8 * MIB, "col": 8 * MIB}
    assert explain(search_blocks(sizes, traffic, 4), sizes, 4).splitlines() == [
        "MiB that enter a node of 4 devices in one step, by axis:",
        "  a node holds                     row  col  total  ratio  sharing",
        "> 2x2 of the grid                   16   16     32   1.00        2",
        "  1x4 of the grid (rows in order)   32    8     40   1.25        4",
        "  4x1 of the grid                    8   32     40   1.25        4",
        "A node holds 2x2 of the grid: 32 MiB enter it in a step; with rows in order it would "
        "be 40.",
    ]


@pytest.mark.parametrize(
    ("sizes", "k", "traffic", "text"),
    [
        (grid(2, 2), 8, {"row": MIB}, "One node holds all 4 devices, so nothing enters it."),
        (grid(4, 4), 4, {"row": MIB, "col": MIB},
            "A node holds 2x2 of the grid: 4 MiB enter it in a step, as with rows in order, but "
            "2 of its devices share the network link, not 4."),
        ((1, 2, 1, 4), 4, {"dp": MIB // 2, "col": 200 * MIB},
            "A node holds 1x4 of the grid (rows in order): 2 MiB enter it in a step; with "
            "dp 2 x 1x2, the next best, it would be 400."),
        ((1, 8, 1, 1), 4, {"dp": MIB},
            "A node holds dp 4 (rows in order): 1 MiB enter it in a step; no other block fills a "
            "node."),
        (grid(4, 5), 4, {"row": MIB, "col": 12 * MIB},
            "A node holds rows in order, wherever a row ends: 28 MiB enter it in a step; "
            "with 4x1 of the grid, the next best, it would be 48."),
    ],
)  # fmt: skip
def test_reason(sizes: Sizes, k: int, traffic: Traffic, text: str) -> None:
    assert explain(search_blocks(sizes, traffic, k), sizes, k).endswith("\n" + text)


@settings(max_examples=100)
@given(case=cases())
def test_everything_can_be_explained(case: tuple[Sizes, Traffic, int]) -> None:
    """The first row is chosen, the plain order is there, and the text is not too wide."""
    sizes, traffic, k = case
    candidates = search_blocks(sizes, traffic, k)
    text = explain(candidates, sizes, k).splitlines()
    (plain,) = (i for i, one in enumerate(candidates) if one.block == plain_block(sizes, k))
    assert len(text) == min(len(candidates), 3) + (plain >= 3) + 3
    assert [row.startswith(">") for row in text[2:-1]] == [True] + [False] * (len(text) - 4)
    assert sum("rows in order" in row for row in text[2:-1]) == 1
    assert max(map(len, text)) <= 150
