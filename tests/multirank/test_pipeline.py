"""Pipelines train exactly as one device, for every family, scheme and order of micro-batches."""

from __future__ import annotations

from typing import Any

import pytest

from gridformer.config import ENCODER_DECODER, Family, LayoutConfig
from gridformer.mesh import Axes
from gridformer.parallel.registry import describe_layout
from tests.support.marks import full_unless
from tests.support.multirank.exactness import axes_of
from tests.support.multirank.pipelines import Layout, compare, family, reads_of, stepper_of
from tests.support.multirank.pool import WorkerPool

Case = tuple[Layout, Family]

SEQUENCE: Layout = {"scheme": "megatron", "cols": 2, "sequence_parallel": True}
OPTIMUS: Layout = {"scheme": "optimus", "rows": 2, "cols": 2}
PANELS: Layout = {**OPTIMUS, "schedule": "pipelined", "stationary": "input"}
KEPT: Layout = {**OPTIMUS, "schedule": "gather", "keep_gathered": "all"}
SUPER: Layout = {"scheme": "subgraph", "branches": 2}
OUTSIDE: Layout = {**SUPER, "attention": "outside", "feed_forward": "common"}
FIRST: Layout = {**SUPER, "common": "first"}
FIRST_OUTSIDE: Layout = {**OUTSIDE, "common": "first"}


def pipe(pp: int, m: int, k: int = 1, **layout: Any) -> Layout:
    return {"pp": pp, "micro_batches": m, "stages_per_rank": k, **layout}


def case_id(case: Case) -> str:
    layout, name = case
    plan = LayoutConfig(**layout)
    words = [name, describe_layout(plan).replace(", ", "-").replace(" ", "_"), plan.pipeline_order]
    words += [f"m{plan.micro_batches}"]
    words += [
        f"{key}_{layout[key]}"
        for key in ("attention", "schedule", "keep_gathered")
        if key in layout
    ]
    return "-".join(words)


# Cases that the exactness matrix lacks: orders other than 1F1B with pp micro-batches.
QUICK: list[Case] = [
    (pipe(2, 4, 2), "t5"),
    (pipe(2, 3, pipeline="gpipe"), "transformer"),
    (pipe(2, 1, scheme="megatron", cols=2), "bert"),
    (pipe(2, 4, 2, **SEQUENCE), "gpt2"),
    (pipe(2, 4, 2, dp=2, dp_mode="fsdp"), "gpt2"),
    (pipe(2, 4, 2, scheme="optimus", rows=2, schedule="gather"), "gpt2"),
    (pipe(2, 3, **FIRST), "bert"),
]
ALSO: list[Case] = [
    (pipe(2, 3), "gpt2"),
    (pipe(4, 8), "gpt2"),
    (pipe(4, 4), "t5"),
    (pipe(2, 4, dp=2), "bert"),
    (pipe(2, 2, **SUPER), "t5"),
    (pipe(2, 2, **OPTIMUS), "t5"),
    (pipe(2, 4, 2, **SEQUENCE), "transformer"),
    (pipe(2, 3, **FIRST), "transformer"),
]
SCHEMES: list[Layout] = [
    {},
    {"dp": 2},
    {"scheme": "megatron", "cols": 2},
    {"scheme": "megatron", "cols": 2, "dp": 2},
    SEQUENCE,
    {"scheme": "megatron_2d", "rows": 2, "cols": 2},
    OPTIMUS,
    PANELS,
    KEPT,
    SUPER,
    OUTSIDE,
    {**SUPER, "dp": 2},
    FIRST,
    FIRST_OUTSIDE,
    {**FIRST, "dp": 2, "order": "contiguous"},
]
ORDERS: list[Layout] = [
    pipe(2, 1),
    pipe(2, 2),
    pipe(2, 6),
    pipe(2, 4, pipeline="gpipe"),
    pipe(2, 6, 2),
    pipe(2, 1, 3),
    pipe(3, 3, 2),
    pipe(4, 3),
    pipe(4, 6),
    pipe(4, 2, 2),
]
FAMILIES: tuple[Family, ...] = ("gpt2", "bert", "t5", "transformer")


def rest() -> list[Case]:
    """Return every scheme with every order and family at least once, on up to 16 ranks."""
    found: list[Case] = []
    for i, scheme in enumerate(SCHEMES):
        for j, order in enumerate(ORDERS):
            name = FAMILIES[(i + j) % 4]
            layout = {**order, **scheme}
            plan = LayoutConfig(**layout)
            fits = plan.n_stages <= (11 if name in ENCODER_DECODER else 6)
            parts = plan.micro_batches * plan.dp * plan.rows * plan.branches
            if fits and 24 % parts == 0 and plan.n_processes <= 16:
                found.append((layout, name))
    return [case for case in found if case not in (*QUICK, *ALSO)]


CASES = sorted([*QUICK, *ALSO, *rest()], key=lambda case: LayoutConfig(**case[0]).n_processes)


def check(pool: WorkerPool, layout: Layout, name: Family, **model: Any) -> None:
    n = LayoutConfig(**layout).n_processes
    for rank, worst in enumerate(pool.run(n, compare, layout, family(name, **model))):
        assert worst["init"] == 0.0, f"rank {rank}: initial weights depend on the layout"
        wrong = {k: v for k, v in worst.items() if not v <= 1e-9}
        assert not wrong, f"rank {rank}: {wrong}"


def in_bfloat16(layout: Layout, name: Family) -> float:
    """Return how far the losses of two steps are from one device's."""
    plan, config = LayoutConfig(**layout), family(name)
    cut = stepper_of(config, plan, axes_of(plan), "bfloat16")
    whole = stepper_of(config, LayoutConfig(), Axes(), "bfloat16")
    reads = enumerate(reads_of(config, 2))
    return max(abs(cut(step, read).loss / whole(step, read).loss - 1) for step, read in reads)


@pytest.mark.parametrize("name", full_unless(lambda name: name == "t5", FAMILIES))
def test_bfloat16_stays_close_to_one_device(pool: WorkerPool, name: Family) -> None:
    """Activations of 2 bytes travel, and sums are rounded in other places."""
    layout = pipe(2, 4, 2, scheme="megatron", cols=2)
    assert max(pool.run(4, in_bfloat16, layout, name)) < 1e-2


@pytest.mark.parametrize("case", full_unless(QUICK.__contains__, CASES), ids=case_id)
def test_equals_one_device(pool: WorkerPool, case: Case) -> None:
    """Cases have dropout everywhere, padding, several losses and uneven stages."""
    check(pool, *case)
