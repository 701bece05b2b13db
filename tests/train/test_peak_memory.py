"""Each step of a run on GPUs says how much memory the fullest process has taken so far."""

from __future__ import annotations

import contextlib
import io
import itertools
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from gridformer.train import console, in_flight_steps
from gridformer.train.metrics import read_metrics
from gridformer.train.plan import Plan
from gridformer.utils.units import GIB
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.runs import plan_of, train, train_a_step_ahead


def test_only_gpus_count_what_they_give(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, asked = torch.device("cuda", 1), []

    def most(device: torch.device) -> int:
        asked.append(device)
        return 7

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", most)
    assert in_flight_steps.peak_bytes(gpu) == 7
    assert in_flight_steps.peak_bytes(torch.device("cpu")) is None
    assert asked == [gpu]


def as_on_gpus(plan: Plan) -> str:
    """Train as if each rank's memory grew by a GiB a step, and return what is printed."""
    steps = itertools.count(1)
    out = io.StringIO()
    with (
        patch.object(
            in_flight_steps, "peak_bytes", lambda _: (10 * dist.get_rank() + next(steps)) * GIB
        ),
        patch.object(console, "_LINE_EVERY_S", -1.0),
        contextlib.redirect_stdout(out),
    ):
        train(plan)
    return out.getvalue()


@pytest.mark.parametrize("ahead", [False, True], ids=["", "a step ahead"])
def test_every_step_tells_the_largest_peak(
    pool: WorkerPool, token_folder: Path, tmp_path: Path, ahead: bool
) -> None:
    plan = plan_of(token_folder, tmp_path, {"dp": 2}, steps=3, eval_batches=1)
    how = (train_a_step_ahead, as_on_gpus) if ahead else (as_on_gpus,)
    printed, other = pool.run(2, *how, plan)
    lines = [line for line in read_metrics(tmp_path) if line["step"]]
    assert [line["peak_memory_gib"] for line in lines] == [11.0, 12.0, 13.0]
    for step, peak in ((1, 11), (2, 12), (3, 13)):
        (line,) = [line for line in printed.splitlines() if f"step     {step}/3" in line]
        assert f"peak {peak} GiB" in line, line
    assert "peak" not in other


def test_processors_tell_no_peak(pool: WorkerPool, token_folder: Path, tmp_path: Path) -> None:
    pool.run(1, train, plan_of(token_folder, tmp_path, {}, steps=1, eval_batches=1))
    assert not any("peak_memory_gib" in line for line in read_metrics(tmp_path))
