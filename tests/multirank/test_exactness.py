"""Every layout trains exactly as one device: loss, every gradient, parameters after 5 steps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multirank.exactness import TOLERANCE, compare
from tests.multirank.pool import WorkerPool

GRIDS: list[dict[str, Any]] = [
    {"scheme": "single"},
    {"scheme": "megatron", "cols": 2},
    {"scheme": "megatron", "cols": 4},
    {"scheme": "megatron", "cols": 4, "sequence_parallel": True},
    {"scheme": "optimus", "rows": 2, "cols": 2},
    {"scheme": "optimus", "rows": 1, "cols": 4},
    {"scheme": "optimus", "rows": 4, "cols": 1},
    {"scheme": "optimus", "rows": 2, "cols": 3},
    {"scheme": "optimus", "rows": 3, "cols": 3},
]
LAYOUTS = sorted(
    (
        {**grid, "dp": dp}
        for grid in GRIDS
        for dp in (1, 2)
        if grid.get("rows", 1) * grid.get("cols", 1) * dp <= 12
    ),
    key=lambda g: g.get("rows", 1) * g.get("cols", 1) * g["dp"],
)
# The gradient of the keys' bias is zero in exact arithmetic (softmax does not see it): in float32
# it is rounding noise, which AdamW with its usual eps scales up to full steps. An eps above the
# noise keeps comparing parameters meaningful in float32; in float64 noise is far below it.
TRAIN = {"global_batch": 24, "clip_norm": 0.05, "lr": 1e-3, "weight_decay": 0.1, "adam_eps": 1e-4}


def name_of(layout: dict[str, Any]) -> str:
    sequence = "-sp" if layout.get("sequence_parallel") else ""
    grid = f"{layout.get('rows', 1)}x{layout.get('cols', 1)}"
    return f"{layout['scheme']}{sequence}-{grid}-dp{layout.get('dp', 1)}"


def check(pool: WorkerPool, layout: dict[str, Any], model: dict[str, Any], **train: Any) -> None:
    n = layout.get("rows", 1) * layout.get("cols", 1) * layout.get("dp", 1)
    settings = {**TRAIN, **train}
    limit = TOLERANCE[settings.get("dtype", "float32")]
    for rank, worst in enumerate(pool.run(n, compare, layout, model, settings)):
        assert worst["init"] == 0.0, f"rank {rank}: initial weights depend on the layout"
        wrong = {k: v for k, v in worst.items() if not v <= limit}
        assert not wrong, f"rank {rank}: {wrong}"


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_equals_one_device(pool: WorkerPool, layout: dict[str, Any], dtype: str) -> None:
    check(pool, layout, {}, dtype=dtype)


@pytest.mark.parametrize("layout", [g for g in LAYOUTS if g["dp"] == 1], ids=name_of)
def test_dropout_masks_do_not_depend_on_the_layout(
    pool: WorkerPool, layout: dict[str, Any]
) -> None:
    check(pool, layout, {"dropout": 0.2, "attention_dropout": 0.1}, dtype="float64")


@pytest.mark.parametrize(
    "layout",
    [
        {"scheme": "megatron", "cols": 2, "dp": 2},
        {"scheme": "megatron", "cols": 4, "sequence_parallel": True},
        {"scheme": "optimus", "rows": 2, "cols": 2, "dp": 2},
        {"scheme": "optimus", "rows": 2, "cols": 3},
    ],
    ids=name_of,
)
def test_accumulating_micro_batches_changes_nothing(
    pool: WorkerPool, layout: dict[str, Any]
) -> None:
    check(pool, layout, {"dropout": 0.1}, dtype="float64", micro_batches=3)


@pytest.mark.parametrize("layout", [g for g in LAYOUTS if g["dp"] == 1], ids=name_of)
def test_bfloat16_stays_close_to_one_device(pool: WorkerPool, layout: dict[str, Any]) -> None:
    """Rounding to 8 bits happens in other places, so only loss and norm are held, and loosely."""
    n = layout.get("rows", 1) * layout.get("cols", 1)
    for worst in pool.run(n, compare, layout, {}, {**TRAIN, "dtype": "bfloat16"}):
        assert worst["init"] == 0.0
        assert worst["loss"] < 2e-3
        assert worst["eval"] < 2e-3
        assert worst["norm"] < 2e-2
