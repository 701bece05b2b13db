"""Counts traffic: the volumes of docs/concepts/placement.md exactly, on every rank.

The tests cover one layer, the embedding, the head and the loss; `test_step_volumes.py` covers whole
steps.
"""

import math
from collections import Counter
from fractions import Fraction
from itertools import product
from typing import Any

import pytest

from gridformer.config import LayoutConfig
from gridformer.parallel.auto.heuristics import decide
from gridformer.parallel.auto.products import Work
from tests.support.marks import full_unless
from tests.support.multirank.exactness import tiny
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.volumes import (
    BSH,
    CONFIG,
    B,
    H,
    S,
    V,
    Volume,
    agrees,
    one_layer,
    optimus,
    passes,
    predicted,
    short,
    volume_of,
)

MEGATRON = [(cols, sequence) for cols in (2, 4) for sequence in (False, True)]
GRIDS = [(1, 4), (4, 1), (2, 2), (2, 3), (3, 3)]
SOME_GRIDS = [(1, 4), (2, 3)]

# Multiples of b s h that a layer's four products move over the rows, in forward.
WIDTHS = {"auto": 1 + 1 + 1 + 1, "output": 1 + 1 + 1 + 4, "input": 3 + 1 + 4 + 1}
# How many of qkv, out, up and down keep their input in place.
INPUT_STATIONARY = {"auto": 2, "output": 0, "input": 4}


def is_quick(case: tuple[tuple[int, int], str, str]) -> bool:
    """Accept both axes with gathers of each choice, and with a broadcast, as pipelined ones."""
    return case[0] == (2, 3) and (case[1] == "gather" or case[1:] == ("broadcast", "auto"))


def along(axis_sizes: tuple[int, int], col: Fraction, row: Fraction) -> dict[str, Fraction]:
    """Return the volume by axis, without axes of one device."""
    rows, cols = axis_sizes
    return {k: v for k, v, n in (("col", col, cols), ("row", row, rows)) if n > 1}


# --------------------------------------------------- one layer


@pytest.mark.parametrize("keep", ["none", "inputs"])
@pytest.mark.parametrize(("cols", "sequence"), MEGATRON)
def test_megatron_layer(pool: WorkerPool, cols: int, sequence: bool, keep: str) -> None:
    layout = {"scheme": "megatron", "cols": cols, "sequence_parallel": sequence}
    unit = Fraction(cols - 1, cols) * BSH
    for forward, backward in pool.run(cols, one_layer, {**layout, "keep_gathered": keep}):
        if not sequence:  # two all-reduces of bsh each way
            want = {"col": 4 * unit}
            counts = Counter(all_reduce=2), Counter(all_reduce=2)
            assert forward.by_axis == backward.by_axis == want
        else:  # half of each all-reduce; inputs that were not kept are gathered again
            again = 2 if keep == "none" else 0
            assert forward.by_axis == {"col": 4 * unit}
            assert backward.by_axis == {"col": (4 + again) * unit}
            counts = (
                Counter(all_gather=2, reduce_scatter=2),
                Counter(all_gather=2 + again, reduce_scatter=2),
            )
        assert (forward.count, backward.count) == tuple({"product": count} for count in counts)


@pytest.mark.parametrize("grid", full_unless((2, 2).__eq__, [(2, 2), (4, 1)]), ids=str)
@pytest.mark.parametrize("scheme", ["megatron_2d", "optimus"])
def test_rows_over_the_sequence(pool: WorkerPool, scheme: str, grid: tuple[int, int]) -> None:
    """Attention gathers keys and values: (r-1)/r 2bsh/c; nothing else differs from other rows."""
    rows, cols = grid
    layout = {"scheme": scheme, "rows": rows, "cols": cols, "rows_over": "sequence"}
    usual = pool.run(rows * cols, one_layer, {**layout, "rows_over": "batch"})
    chunks = {12: 4, 6: 3}[CONFIG.n_heads // cols]
    for found, others in zip(pool.run(rows * cols, one_layer, layout), usual):
        for one, other, op in zip(found, others, ("all_gather", "reduce_scatter")):
            assert one.moved.pop("attention") == Fraction(rows - 1, rows * cols) * 2 * BSH
            assert one.count.pop("attention") == Counter({op: chunks})
            assert (one.moved, one.count) == (other.moved, other.count)


@pytest.mark.parametrize("keep", ["none", "inputs", "weights", "all"])
@pytest.mark.parametrize("grid", full_unless(lambda grid: grid == (2, 3), GRIDS), ids=str)
def test_megatron_2d_layer(pool: WorkerPool, grid: tuple[int, int], keep: str) -> None:
    """Forward moves (c-1)/(rc) 4bsh + (r-1)/(rc) 12h², and norms send nothing.

    Backward moves as much again for gradients, and once more what was gathered and not kept.
    """
    rows, cols = grid
    layout = {"scheme": "megatron_2d", "rows": rows, "cols": cols, "keep_gathered": keep}
    unit = Fraction(cols - 1, rows * cols) * BSH
    weights = Fraction(rows - 1, rows * cols) * 12 * H**2
    inputs_again = 0 if keep in ("inputs", "all") else 2  # for the two products that open a section
    weights_again = 0 if keep in ("weights", "all") else 1
    col, row = int(cols > 1), int(rows > 1)
    for forward, backward in pool.run(rows * cols, one_layer, layout):
        assert forward.by_axis == along(grid, 4 * unit, weights)
        assert backward.by_axis == along(
            grid, (4 + inputs_again) * unit, (1 + weights_again) * weights
        )
        counts = Counter(all_gather=2 * col + 4 * row, reduce_scatter=2 * col)
        assert forward.count == {"product": +counts}
        gathered = (2 + inputs_again) * col + 4 * weights_again * row
        counts = Counter(all_gather=gathered, reduce_scatter=2 * col + 4 * row)
        assert backward.count == {"product": +counts}


@pytest.mark.parametrize(
    ("grid", "schedule", "stationary"),
    full_unless(
        is_quick, [*product(GRIDS, ("broadcast", "pipelined", "gather"), WIDTHS)], unpack=True
    ),
)
def test_optimus_layer(
    pool: WorkerPool, grid: tuple[int, int], schedule: str, stationary: str
) -> None:
    """Forward moves (c-1)/(rc) of 4, 7 or 9 bsh, and (r-1)/(rc) of 12h².

    Backward moves at most twice that: one gather of a layer's gradients serves both products that
    need it. Each product takes two messages, or a loop over panels whose steps send at most one
    message per axis; each norm takes one. The original sends 28 per layer.
    """
    rows, cols = grid
    layout = optimus(grid, schedule=schedule, stationary=stationary)
    unit = Fraction(cols - 1, rows * cols) * BSH
    weights = Fraction(rows - 1, rows * cols) * 12 * H**2
    norm = 2 * 2 * Fraction(B * S, rows)  # two norms exchange two numbers per token each
    gathered, reduced = (cols - 1) * norm, Fraction(2 * (cols - 1), cols) * norm
    width = back = WIDTHS[stationary]
    if schedule != "gather":
        back = 2 * width
    # gathered operands are gathered again, and their gradients scattered
    elif stationary != "input":
        back = {"auto": 2 + 1 + 2 + 1, "output": 2 * 7}[stationary]
    panels = 1 if schedule == "gather" else rows + cols - math.gcd(rows, cols)
    spread, add = ("all_gather", "reduce_scatter") if panels == 1 else ("broadcast", "reduce")
    col, row, summed = panels * (cols > 1), panels * (rows > 1), INPUT_STATIONARY[stationary]
    # dA = dC Bᵀ and dB = Aᵀ dC; if the input stays, dA = dC B and dB = dCᵀ A. Then a panel of dC
    # travels for each of them, and gathered once for both.
    twice = summed * col if schedule != "gather" else 0
    ahead = Counter({spread: 4 * row + (4 - summed) * col, add: summed * col})
    behind = Counter({spread: 4 * row + 4 * col + twice, add: 4 * row + (4 - summed) * col})
    for forward, backward in pool.run(rows * cols, one_layer, layout):
        assert forward.by_axis == along(grid, width * unit + gathered, weights)
        assert backward.by_axis == along(grid, back * unit + reduced, 2 * weights)
        assert forward.moved.get("norm", 0) == gathered
        assert backward.moved.get("norm", 0) == reduced
        norms = [{"norm": Counter({op: 2})} if col else {} for op in ("all_gather", "all_reduce")]
        assert forward.count == {"product": +ahead, **norms[0]}
        assert backward.count == {"product": +behind, **norms[1]}


@pytest.mark.parametrize("keep", ["none", "inputs"])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("grid", full_unless(lambda grid: grid == (2, 3), GRIDS), ids=str)
def test_stationary_weights_layer(
    pool: WorkerPool, grid: tuple[int, int], sequence: bool, keep: str
) -> None:
    """Forward moves (c-1)/(rc) 4bsh + (r-1)/(rc) 12bsh, and no weight is sent, nor its gradient.

    Backward moves as much, and once more what products gather unless it is kept.
    """
    rows, cols = grid
    layout = {"scheme": "optimus", "rows": rows, "cols": cols, "stationary": "weight"}
    layout |= {"sequence_parallel": sequence, "keep_gathered": keep}
    over_cols, over_rows = (Fraction(n - 1, rows * cols) * BSH for n in (cols, rows))
    again = (2 * over_cols, 5 * over_rows) if keep == "none" else (0, 0)
    norm = 2 * 2 * Fraction(B * S, cols)  # two norms exchange two numbers per token each
    gathered, reduced = (rows - 1) * norm, Fraction(2 * (rows - 1), rows) * norm
    col, row = int(cols > 1), int(rows > 1)
    for forward, backward in pool.run(rows * cols, one_layer, layout):
        assert forward.by_axis == along(grid, 4 * over_cols, 12 * over_rows + gathered)
        back = 4 * over_cols + again[0], 12 * over_rows + again[1] + reduced
        assert backward.by_axis == along(grid, *back)
        counts = Counter(all_gather=2 * (col + row), reduce_scatter=2 * (col + row))
        assert forward.count["product"] == +counts
        counts["all_gather"] += 2 * (col + row) * (keep == "none")
        assert backward.count["product"] == +counts


# --------------------------------------------------- predicted volumes


SAID: list[dict[str, Any]] = [
    *(
        {"scheme": "megatron", "cols": 4, "sequence_parallel": sequence, "keep_gathered": keep}
        for sequence in (False, True)
        for keep in ("none", "inputs", "weights", "all")
    ),
    *(
        {"scheme": "megatron_2d", "rows": rows, "cols": cols, "keep_gathered": keep}
        for rows, cols in GRIDS
        for keep in ("none", "inputs", "weights", "all")
    ),
    *(
        optimus(grid, stationary=stationary, keep_gathered=keep)
        for grid in GRIDS
        for stationary in ("auto", "output", "input")
        for keep in ("none", "inputs", "weights", "all")
    ),
    *(
        {"scheme": "optimus", "rows": rows, "cols": cols, "stationary": "weight"}
        | {"keep_gathered": keep, "sequence_parallel": keep == "none"}
        for rows, cols in GRIDS
        for keep in ("none", "inputs")
    ),
    *(
        optimus(grid, stationary=stationary, schedule=schedule)
        for grid in GRIDS
        for stationary in ("auto", "output", "input")
        for schedule in ("broadcast", "pipelined")
    ),
]


def layers(layouts: list[dict[str, Any]]) -> list[tuple[Volume, Volume]]:
    return [one_layer(layout, "product") for layout in layouts]


KINDS = sorted({(layout.get("rows", 1), layout["cols"]) for layout in SAID})


@pytest.mark.parametrize("kind", full_unless(lambda kind: kind == (2, 2), KINDS), ids=str)
def test_layer_traffic_equals_the_prediction(pool: WorkerPool, kind: tuple[int, int]) -> None:
    """Compare volumes and messages of one micro-batch, for everything that can be chosen."""
    layouts = [layout for layout in SAID if (layout.get("rows", 1), layout["cols"]) == kind]
    n = kind[0] * kind[1]
    for volumes in pool.run(n, layers, layouts):
        for layout, (forward, backward) in zip(layouts, volumes):
            choices = decide(CONFIG, LayoutConfig(**layout), Work(tokens=B * S))
            said = predicted(choices)
            try:
                agrees(forward, said[0])
                agrees(backward, said[1])
            except AssertionError as error:
                raise AssertionError(f"{short(layout)}: {error}") from error


# --------------------------------------------------- head and embedding


def both_ends(layout: dict[str, Any]) -> tuple[Volume, Volume]:
    """Return the traffic of the embedding's and the head's products."""
    whole, layer = passes(LayoutConfig(**layout), tiny(n_layers=1)), one_layer(layout, "product")
    forward, backward = (volume_of(a, "product").minus(b) for a, b in zip(whole, layer))
    return forward, backward


@pytest.mark.parametrize("schedule", ["broadcast", "gather"])
@pytest.mark.parametrize("grid", full_unless(SOME_GRIDS.__contains__, GRIDS), ids=str)
def test_logits_never_travel(pool: WorkerPool, grid: tuple[int, int], schedule: str) -> None:
    """If the narrower activation travels, embedding and head move bsh each way.

    With the paper's placement, bsv travels for the logits.
    """
    rows, cols = grid
    padded = -(-V // math.lcm(rows, cols)) * math.lcm(rows, cols)
    unit = Fraction(cols - 1, rows * cols) * B * S
    table = Fraction(rows - 1, rows * cols) * padded * H
    for forward, backward in pool.run(rows * cols, both_ends, optimus(grid, schedule=schedule)):
        assert forward.by_axis == along(grid, (H + H) * unit, 2 * table)
        assert backward.by_axis == along(grid, (H + 2 * H) * unit, 3 * table)
    layout = optimus(grid, schedule=schedule, stationary="input")
    again = 1 if schedule == "gather" else 2
    for forward, backward in pool.run(rows * cols, both_ends, layout):
        assert forward.by_axis == along(grid, padded * unit, 2 * table)
        assert backward.by_axis == along(grid, again * padded * unit, 3 * table)


@pytest.mark.parametrize(("cols", "sequence"), MEGATRON)
def test_embedding_and_head_of_megatron(pool: WorkerPool, cols: int, sequence: bool) -> None:
    """The embedding's result and the head's gradient are summed; nothing of width v travels."""
    layout = {"scheme": "megatron", "cols": cols, "sequence_parallel": sequence}
    unit = Fraction(cols - 1, cols) * BSH
    again = 1 if sequence else 0
    for forward, backward in pool.run(cols, both_ends, {**layout, "keep_gathered": "none"}):
        assert forward.by_axis == {"col": 2 * unit}
        assert backward.by_axis == {"col": (2 + again) * unit}


@pytest.mark.parametrize(
    "layout",
    [
        {"scheme": "megatron", "cols": 2},
        {"scheme": "megatron", "cols": 4, "sequence_parallel": True},
        {"scheme": "megatron_2d", "rows": 2, "cols": 2},
        {"scheme": "optimus", "rows": 1, "cols": 4},
        {"scheme": "optimus", "rows": 2, "cols": 3},
        {"scheme": "optimus", "rows": 2, "cols": 3, "schedule": "broadcast", "stationary": "input"},
        {"scheme": "optimus", "rows": 4, "cols": 1},
    ],
    ids=short,
)
def test_loss_moves_three_numbers_a_token(pool: WorkerPool, layout: dict[str, Any]) -> None:
    """Forward all-reduces three numbers in two messages, backward none; logits never travel."""
    rows, cols = layout.get("rows", 1), layout["cols"]
    tokens = Fraction(B * S, rows)
    for forward, backward in pool.run(rows * cols, loss_traffic, layout):
        if cols > 1:
            assert forward.count["loss"] == Counter(all_reduce=2)
            assert forward.moved["loss"] == 3 * Fraction(2 * (cols - 1), cols) * tokens
        else:
            assert "loss" not in forward.count
        assert "loss" not in backward.count


def loss_traffic(layout: dict[str, Any]) -> tuple[Volume, Volume]:
    forward, backward = passes(LayoutConfig(**layout), tiny(n_layers=1))
    return volume_of(forward, "loss"), volume_of(backward, "loss")
