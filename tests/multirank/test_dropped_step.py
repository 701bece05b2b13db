"""A run that is told to stop inside a step drops it, saves what was before it, and goes on exactly.

The step is dropped at the same micro-batch on all ranks, whatever they send to each other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gridformer.checkpoint import find
from gridformer.checkpoint.manifest import verify_checkpoint
from tests.support.multirank.faults import MICRO, told
from tests.support.multirank.layouts import name_of
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.runs import STEPS, losses, plan_of, stored, train

LAYOUTS: list[dict[str, Any]] = [
    {"scheme": "single", "dp": 2},
    {"scheme": "megatron", "cols": 2, "pp": 2},
    {"scheme": "single", "dp": 2, "dp_mode": "fsdp"},
    {"scheme": "single", "pp": 2, "stages_per_rank": 2},
    {"scheme": "optimus", "rows": 2, "cols": 2},
]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=[pytest.mark.full] * (n > 1), id=name_of(layout))
        for n, layout in enumerate(LAYOUTS)
    ],
)
def test_a_step_is_dropped_and_the_run_goes_on_exactly(
    pool: WorkerPool, token_folder: Path, tmp_path: Path, layout: dict[str, Any]
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    layout = {"rows": 1, "cols": 1, "micro_batches": MICRO, **layout}
    settings: dict[str, Any] = {"save_every": 0}
    n = plan_of(token_folder, whole, layout, **settings).n_processes
    pool.run(n, train, plan_of(token_folder, whole, layout, **settings))
    plan = plan_of(token_folder, cut, layout, **settings)
    ends = pool.run(n, told, plan, tmp_path / "store", 3, 2)
    assert len({*ends}) == 1, "all stop for the same reason with the same exit code"
    assert 0 < ends[0][0] < MICRO, "the step was dropped inside it"
    assert ends[0][1:] == (75, "SIGTERM")
    folder = find.latest(cut)
    assert folder is not None
    assert verify_checkpoint(folder).step == 2, "the steps before it are saved"
    pool.run(n, train, plan_of(token_folder, cut, layout, **settings))
    assert losses(cut) == losses(whole)
    assert len(losses(cut)) == STEPS
    for name, block in stored(whole).items():
        assert (stored(cut)[name] == block).all(), name
