"""Every layout trains exactly as one device: loss, every gradient, and parameters after some steps.

`compare` also checks that initial weights do not depend on the layout, and which weights decay.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gridformer.config import LayoutConfig
from gridformer.parallel import build_parallel
from gridformer.parallel.data.copies import assert_copies_equal
from tests.support.marks import full_unless
from tests.support.multirank.exactness import (
    CPU,
    EVERYTHING,
    TOLERANCE,
    TRAIN,
    axes_of,
    compare,
    tiny,
)
from tests.support.multirank.layouts import GRIDS, Layout, n_of, name_of
from tests.support.multirank.pool import WorkerPool


def by_size(layouts: list[Layout]) -> list[Layout]:
    """Sort layouts by size: process groups are rebuilt whenever their size changes."""
    return sorted(layouts, key=n_of)


LAYOUTS = by_size([{**g, "dp": dp} for g in GRIDS for dp in (1, 2) if n_of({**g, "dp": dp}) <= 12])
OPTIMUS = [grid for grid in GRIDS if grid["scheme"] == "optimus"]
PRODUCTS = by_size(
    [
        {**grid, "schedule": schedule, "stationary": stationary}
        for grid in OPTIMUS
        for schedule in ("broadcast", "pipelined", "gather")
        for stationary in ("auto", "output", "input")
    ]
)
TWO_BY_TWO: Layout = {"scheme": "optimus", "rows": 2, "cols": 2}
WEIGHTS_TOO: Layout = {"scheme": "megatron_2d", "rows": 2, "cols": 2}
TWO_BY_THREE: Layout = {"scheme": "optimus", "rows": 2, "cols": 3}
SEQUENCE: Layout = {"scheme": "megatron", "cols": 4, "sequence_parallel": True}
KEPT = by_size(
    [
        {**grid, "schedule": "gather", "stationary": stationary, "keep_gathered": keep}
        for grid in (TWO_BY_TWO, TWO_BY_THREE)
        for stationary in ("auto", "output")
        for keep in ("none", "inputs", "weights", "all")
    ]
    + [{**SEQUENCE, "keep_gathered": keep} for keep in ("none", "inputs")]
    + [{**WEIGHTS_TOO, "keep_gathered": keep} for keep in ("none", "inputs", "weights", "all")]
)
# With `output` some products have other operands than with `auto`; the same operands are kept.
KEPT_ALSO = [layout for layout in KEPT if layout["cols"] == 2] + [
    {**TWO_BY_THREE, "schedule": "gather", "stationary": stationary, "keep_gathered": keep}
    for stationary, keep in (
        *(("output", "none"), ("output", "weights")),
        *(("auto", "weights"), ("auto", "inputs")),
    )
]
DROPPED: list[Layout] = [{**TWO_BY_THREE, "dp": 1}, {**SEQUENCE, "dp": 1}]
DROPPED.append({"scheme": "megatron", "cols": 4, "dp": 1})
SOME_PRODUCTS = by_size(
    [
        {**TWO_BY_TWO, "schedule": "broadcast", "stationary": "input"},
        {**TWO_BY_TWO, "schedule": "pipelined", "stationary": "auto", "dp": 2},
        {**TWO_BY_TWO, "schedule": "gather", "keep_gathered": "none"},
        {**TWO_BY_THREE, "schedule": "pipelined", "stationary": "output"},
        {**TWO_BY_THREE, "schedule": "gather", "stationary": "input", "keep_gathered": "all"},
    ]
)


def check(
    pool: WorkerPool, layout: Layout, model: dict[str, Any], n_steps: int = 3, **train: Any
) -> None:
    settings = {**TRAIN, **train}
    limit = TOLERANCE[settings.get("dtype", "float32")]
    results = pool.run(n_of(layout), compare, layout, model, settings, n_steps)
    for rank, worst in enumerate(results):
        assert worst["init"] == 0.0, f"rank {rank}: initial weights depend on the layout"
        wrong = {k: v for k, v in worst.items() if not v <= limit}
        assert not wrong, f"rank {rank}: {wrong}"


@pytest.mark.parametrize(
    "layout",
    full_unless(lambda layout: layout["dp"] == 1 and n_of(layout) in (3, 6), LAYOUTS),
    ids=name_of,
)
def test_equals_one_device(pool: WorkerPool, layout: Layout) -> None:
    check(pool, layout, {}, dtype="float64")


@pytest.mark.parametrize(
    "layout",
    full_unless(lambda layout: layout["dp"] == 1 and n_of(layout) == 2, LAYOUTS),
    ids=name_of,
)
def test_equals_one_device_in_float32(pool: WorkerPool, layout: Layout) -> None:
    check(pool, layout, {}, n_steps=2, dtype="float32")


@pytest.mark.parametrize(
    "layout",
    full_unless(lambda layout: layout in DROPPED, [g for g in LAYOUTS if g["dp"] == 1]),
    ids=name_of,
)
def test_dropout_masks_do_not_depend_on_the_layout(pool: WorkerPool, layout: Layout) -> None:
    """Using one mask twice on a grid would differ from one device's masks."""
    check(pool, layout, {"dropout": 0.2, "attention_dropout": 0.1}, dtype="float64")


@pytest.mark.parametrize(
    "layout",
    full_unless(
        lambda layout: "sequence_parallel" in layout,
        [
            {"scheme": "megatron", "cols": 2, "dp": 2},
            {"scheme": "megatron", "cols": 4, "sequence_parallel": True},
            {"scheme": "optimus", "rows": 2, "cols": 2, "dp": 2},
            {"scheme": "optimus", "rows": 2, "cols": 3},
        ],
    ),
    ids=name_of,
)
def test_accumulating_micro_batches_changes_nothing(pool: WorkerPool, layout: Layout) -> None:
    check(pool, {**layout, "micro_batches": 3}, {"dropout": 0.1}, dtype="float64")


def on_three_columns(layout: Layout) -> bool:
    """Accept 2x3 layouts with one stationary choice per schedule, all of them different."""
    each = (("broadcast", "input"), ("pipelined", "output"), ("gather", "auto"))
    one = (layout["schedule"], layout["stationary"]) in each
    return (layout["rows"], layout["cols"]) == (2, 3) and one


@pytest.mark.parametrize("layout", full_unless(on_three_columns, PRODUCTS), ids=name_of)
def test_schedules_and_stationary_operands(pool: WorkerPool, layout: Layout) -> None:
    check(pool, {**layout, "micro_batches": 2}, EVERYTHING, n_steps=2, dtype="float64")


@pytest.mark.parametrize(
    "layout", full_unless(lambda layout: layout not in KEPT_ALSO, KEPT), ids=name_of
)
def test_kept_operands(pool: WorkerPool, layout: Layout) -> None:
    """A weight that was kept into the next step would show in the next step's loss."""
    settings = {"global_batch": 36, "dtype": "float64"}
    check(pool, {**layout, "micro_batches": 3}, EVERYTHING, n_steps=2, **settings)


@pytest.mark.parametrize(
    "layout", full_unless(lambda layout: layout["cols"] == 3, SOME_PRODUCTS), ids=name_of
)
def test_schedules_in_float32(pool: WorkerPool, layout: Layout) -> None:
    check(pool, layout, {"max_seq_len": 12}, n_steps=3, dtype="float32")


@pytest.mark.parametrize(
    "layout",
    full_unless(
        lambda layout: layout == TWO_BY_THREE,
        [{"scheme": "megatron", "cols": 2}, SEQUENCE, WEIGHTS_TOO, TWO_BY_TWO, TWO_BY_THREE],
    ),
    ids=name_of,
)
@pytest.mark.parametrize("ffn_size", [24, 48])
def test_feed_forward_no_wider_than_the_model(
    pool: WorkerPool, layout: Layout, ffn_size: int
) -> None:
    """With such sizes, another activation than usual is the narrower one."""
    model = {"ffn_size": ffn_size, "vocab_size": 13, "n_layers": 1, "max_seq_len": 12}
    check(pool, layout, model, n_steps=2, dtype="float64")


WIDTHS = by_size(
    [
        {"scheme": "megatron", "cols": 4},
        {"scheme": "megatron", "cols": 4, "sequence_parallel": True},
        {"scheme": "megatron_2d", "rows": 2, "cols": 4},
    ]
)


@pytest.mark.parametrize(
    "layout", full_unless(lambda layout: "rows" not in layout, WIDTHS), ids=name_of
)
def test_a_width_that_the_columns_do_not_divide(pool: WorkerPool, layout: Layout) -> None:
    """Heads may have their own width, and then the model's width need not divide.

    Between sections every device then holds all of it.
    """
    model = {"hidden_size": 10, "n_heads": 4, "head_dim": 3, "n_layers": 1, "max_seq_len": 12}
    check(pool, layout, model, n_steps=2, dtype="float64")


def with_one_copy_changed(layout: Layout, name: str, rank: int) -> str:
    """Return what the sanity check says on this rank."""
    plan = LayoutConfig(**layout)
    axes = axes_of(plan)
    model = build_parallel(tiny(), plan, axes, 1, CPU)
    assert_copies_equal(model, axes)
    if axes.world.index == rank:
        with torch.no_grad():
            model.get_parameter(name)[-1] += 1e-6
    try:
        assert_copies_equal(model, axes)
    except RuntimeError as error:
        return str(error)
    return "equal"


@pytest.mark.parametrize(
    ("layout", "name", "axis"),
    [
        ({**TWO_BY_TWO, "scheme": "megatron_2d"}, "norm.weight", "grid"),
        (SEQUENCE, "layers.0.mlp.down.bias", "col"),
    ],
)
def test_unequal_copies_are_found(pool: WorkerPool, layout: Layout, name: str, axis: str) -> None:
    """Each device of a grid has a copy of the last norm, or each of a row one of a bias."""
    for sentence in pool.run(4, with_one_copy_changed, layout, name, 3):
        assert sentence == f"copies over axis {axis} differ: {name}"


@pytest.mark.parametrize(
    "layout",
    full_unless(
        lambda layout: layout in (SEQUENCE, TWO_BY_TWO),
        [SEQUENCE, {"scheme": "megatron", "cols": 2}, WEIGHTS_TOO, *SOME_PRODUCTS, TWO_BY_TWO],
    ),
    ids=name_of,
)
def test_bfloat16_stays_close_to_one_device(pool: WorkerPool, layout: Layout) -> None:
    """Rounding to 8 bits happens in other places, so loss and norm are compared loosely."""
    n = LayoutConfig(**layout).n_processes
    for worst in pool.run(n, compare, layout, {}, {**TRAIN, "dtype": "bfloat16"}, 3):
        assert worst["init"] == 0.0
        assert worst["loss"] < 2e-3
        assert worst["eval"] < 2e-3
        assert worst["norm"] < 2e-2
