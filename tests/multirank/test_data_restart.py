"""Runs that resume with another batch and length: the order of samples begins anew, exactly."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gridformer.checkpoint.checkpoint import check_same_run, data_start_of
from gridformer.checkpoint.manifest import read_manifest
from gridformer.data import TokenFolder
from gridformer.train.plan import Plan
from gridformer.utils.errors import CheckpointError
from tests.support.data import open_batches
from tests.support.multirank.layouts import n_of
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.runs import STEPS, losses, plan_of, train

FIRST, LATER = 2, 4  # the steps after which the data change, and at which the grid is left
GRID: dict[str, Any] = {"scheme": "optimus", "rows": 2, "cols": 2}


def changed_plan(data: Path, out: Path, layout: dict[str, Any], restart: bool = True) -> Plan:
    """Plan what is left of a run with half the batch and shorter samples, as `train` does."""
    plan = plan_of(data, out, layout, global_batch=12, save_every=1, keep_checkpoints=9)
    values = plan.run.data.model_copy(update={"seq_len": 8, "restart": restart})
    run = plan.run.model_copy(update={"data": values})
    assert plan.resume is not None
    manifest = read_manifest(plan.resume)
    check_same_run(manifest, run, plan.resume)
    return replace(plan, run=run, data_start=data_start_of(manifest, run))


def resume_at(finished: Path, step: int, out: Path) -> Path:
    name = f"step-{step:08d}"
    shutil.copytree(finished / "checkpoints" / name, out / "checkpoints" / name)
    return out


def test_what_resumes_with_other_data_is_exact(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    """One device, a grid, and a grid that one device takes over have the same losses."""
    first = tmp_path / "first"
    pool.run(1, train, plan_of(token_folder, first, {}, steps=FIRST))
    alone, grid = (resume_at(first, FIRST, tmp_path / name) for name in ("alone", "grid"))
    plan = changed_plan(token_folder, alone, {})
    assert plan.data_start == FIRST
    pool.run(1, train, plan)
    pool.run(n_of(GRID), train, changed_plan(token_folder, grid, GRID))
    moved = resume_at(grid, LATER, tmp_path / "moved")
    plan = changed_plan(token_folder, moved, {})
    assert (plan.resume_step, plan.data_start) == (LATER, FIRST), "it began anew only once"
    pool.run(1, train, plan)
    want = losses(alone)
    assert list(want) == list(range(FIRST + 1, STEPS + 1))
    for out in (grid, moved):
        for step, got in losses(out).items():
            assert got == pytest.approx(want[step], rel=1e-9), (out, step)
    assert changed_plan(token_folder, alone, {}, restart=False).data_start == FIRST

    plan = plan_of(token_folder, first, {}, global_batch=12)
    assert plan.resume is not None
    manifest = read_manifest(plan.resume)
    with pytest.raises(CheckpointError, match=r"global_batch is 12, there 24.*data\.restart=true"):
        check_same_run(manifest, plan.run, plan.resume)


def test_the_first_batch_is_that_of_a_new_run(token_folder: Path, tmp_path: Path) -> None:
    run = plan_of(token_folder, tmp_path, {}).run
    new = open_batches(run, TokenFolder.open(run.data.path), "train")
    later = replace(new, start=7)
    for step in range(3):
        for key, value in new.batch(step).items():
            assert np.array_equal(later.batch(step + 7)[key], value)
