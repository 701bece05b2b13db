"""Checkpoints of sharded replicas resume under any other layout, and the reverse."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.marks import full_unless
from tests.support.multirank.layouts import n_of
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.runs import (
    assert_same_run,
    losses,
    plan_of,
    start_from,
    stored,
    title,
    train,
)

Layout = dict[str, Any]

SHAPES: list[Layout] = [
    {"scheme": "single", "dp": 2},
    {"scheme": "single", "dp": 3},
    {"scheme": "megatron", "cols": 2, "dp": 2},
    {"scheme": "megatron", "cols": 2, "sequence_parallel": True, "dp": 2},
    {"scheme": "optimus", "rows": 2, "cols": 2, "dp": 2},
    {"scheme": "optimus", "rows": 2, "cols": 1, "dp": 2, "stationary": "input"},
    {"scheme": "subgraph", "branches": 2, "dp": 2},
    {"scheme": "subgraph", "branches": 2},
    {"scheme": "subgraph", "branches": 2, "dp": 2, "common": "first"},
]
MODES = ("replicate", "zero1", "fsdp")
ALL = [
    {**shape, "dp_mode": mode}
    for shape in SHAPES
    for mode in MODES
    if mode == "replicate" or shape.get("dp", 1) > 1 or "branches" in shape
]
CUT = [layout for layout in ALL if layout["dp_mode"] != "replicate"]


def named(layout: Layout) -> str:
    first = "-first" if "common" in layout else ""
    return f"{title(layout)}{first}-{layout.get('dp_mode', 'replicate')}"


@pytest.mark.parametrize(
    "layout",
    full_unless(
        lambda layout: layout == {**SHAPES[1], "dp_mode": "fsdp"},
        CUT,
    ),
    ids=named,
)
def test_same_layout_is_bit_exact(
    pool: WorkerPool, token_folder: Path, tmp_path: Path, layout: Layout
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    pool.run(n_of(layout), train, plan_of(token_folder, whole, layout, dtype="float32"))
    start_from(whole, resumed)
    pool.run(n_of(layout), train, plan_of(token_folder, resumed, layout, dtype="float32"))
    assert losses(resumed) == losses(whole)
    want, got = stored(whole), stored(resumed)
    assert want.keys() == got.keys()
    for key in want:
        assert torch.equal(want[key], got[key]), key


def test_a_part_is_written_once(pool: WorkerPool, token_folder: Path, tmp_path: Path) -> None:
    """The replica that updates a block writes it: all elements of all tensors, once."""
    sizes = []
    for mode in MODES:
        layout = {"scheme": "single", "dp": 3, "dp_mode": mode}
        out = tmp_path / mode
        pool.run(3, train, plan_of(token_folder, out, layout))
        blocks = stored(out)
        sizes.append(sum(block.numel() for block in blocks.values()))
        most = max(block.shape[0] for (name, _), block in blocks.items() if "tokens" in name)
        assert most == (301 if mode == "replicate" else 101)
    assert len({*sizes}) == 1


def pairs(n: int) -> list[tuple[Layout, Layout]]:
    """Return pairs of layouts; the first two pairs visit every mode."""
    single, three, grid = SHAPES[0], SHAPES[1], SHAPES[4]
    found = [
        ({**three, "dp_mode": "zero1"}, {**single, "dp_mode": "fsdp"}),
        ({**grid, "dp_mode": "fsdp"}, {"scheme": "single"}),
        ({"scheme": "megatron", "cols": 2}, {**three, "dp_mode": "fsdp"}),
        ({**SHAPES[6], "dp_mode": "fsdp"}, {**SHAPES[3], "dp_mode": "zero1"}),
    ]
    chooser = random.Random(7)
    while len(found) < n:
        pair = chooser.choice(ALL), chooser.choice(ALL)
        if pair[0] != pair[1] and any(one in CUT for one in pair) and pair not in found:
            found.append(pair)
    return found


PAIRS = pairs(14)


@pytest.mark.parametrize(
    "pair",
    full_unless(lambda pair: pair in PAIRS[:2], PAIRS),
    ids=lambda pair: "-to-".join(map(named, pair)),
)
def test_any_mode_resumes_from_any_other(
    pool: WorkerPool, token_folder: Path, tmp_path: Path, pair: tuple[Layout, Layout]
) -> None:
    before, after = pair
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    pool.run(n_of(before), train, plan_of(token_folder, whole, before))
    start_from(whole, moved)
    pool.run(n_of(after), train, plan_of(token_folder, moved, after))
    assert_same_run(whole, moved)
