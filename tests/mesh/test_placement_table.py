"""The explanation of where ranks lie on nodes: its table and its sentence."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from gridformer.mesh.node_placement import Sizes, explain, plain_block, search_blocks
from tests.support.meshes import MIB, Traffic, cases, grid


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


def test_plain_order_is_always_in_the_table() -> None:
    sizes, traffic = (1, 4, 8, 8), {"dp": 40 * MIB, "row": 8 * MIB, "col": 8 * MIB}
    candidates = search_blocks(sizes, traffic, 8)
    rows = explain(candidates, sizes, 8, few=2).splitlines()[2:-1]
    assert [" ".join(row.split()) for row in rows] == [
        "> dp 4 x 1x2 0 64 32 96 1.00 8",
        "dp 4 x 2x1 0 32 64 96 1.00 8",
        "1x8 of the grid (rows in order) 320 64 0 384 4.00 8",
    ]
    assert len(explain(candidates, sizes, 8, few=99).splitlines()) == len(candidates) + 3


@pytest.mark.parametrize(
    ("sizes", "k", "traffic", "text"),
    [
        (grid(2, 2), 8, {"row": MIB}, "One node holds all 4 devices, so nothing enters it."),
        (
            grid(4, 4),
            4,
            {"row": MIB, "col": MIB},
            "A node holds 2x2 of the grid: 4 MiB enter it in a step, as with rows in order, but "
            "2 of its devices share the network link, not 4.",
        ),
        (
            (1, 2, 1, 4),
            4,
            {"dp": MIB // 2, "col": 200 * MIB},
            "A node holds 1x4 of the grid (rows in order): 2 MiB enter it in a step; with "
            "dp 2 x 1x2, the next best, it would be 400.",
        ),
        (
            (1, 8, 1, 1),
            4,
            {"dp": MIB},
            "A node holds dp 4 (rows in order): 1 MiB enter it in a step; no other block fills a "
            "node.",
        ),
        (
            grid(4, 5),
            4,
            {"row": MIB, "col": 12 * MIB},
            "A node holds rows in order, wherever a row ends: 28 MiB enter it in a step; "
            "with 4x1 of the grid, the next best, it would be 48.",
        ),
    ],
)
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
