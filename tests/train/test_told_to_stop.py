"""If one rank is told to stop, all stop after the same step, with one checkpoint.

On GPUs that is a step later, because the next one has been started by then.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gridformer.checkpoint import find
from gridformer.checkpoint.manifest import read_manifest, verify_checkpoint
from gridformer.config import parse_run
from gridformer.data import TokenFolder, resolve
from gridformer.mesh.process_group import World
from gridformer.parallel.auto.decisions import decide_run
from gridformer.train.heartbeat import health_of
from gridformer.train.metrics import lacks_evaluation, read_metrics
from gridformer.train.plan import Plan
from gridformer.train.trainer import Trainer
from gridformer.utils import signals
from tests.support.multirank.pool import WorkerPool

STEPS = 6


def train(folder: Path, out: Path, told: int, lag: int, before: int = 2) -> tuple[int, bool]:
    """On one of two ranks, return the steps done, and whether this rank itself was told to stop.

    Rank `told` is told before step `before`.
    """
    sections: dict[str, Any] = {
        "model": {"n_layers": 1, "hidden_size": 16, "n_heads": 2, "max_seq_len": 16},
        "data": {"path": str(folder)},
        "layout": {"scheme": "single", "rows": 1, "cols": 1, "dp": 2},
        "train": {"steps": STEPS, "global_batch": 4, "eval_every": 0, "save_every": 0},
    }
    run = resolve(parse_run(sections), TokenFolder.open(folder))
    rank, done = dist.get_rank(), 0
    stop = signals.install(signals.StopPolicy(grace_s=600.0))
    try:
        resume = find.latest(out)
        step = read_manifest(resume).step if resume else 0
        plan = Plan(run, out, resume, step, decide_run(run))
        trainer = Trainer(
            replace(plan, unevaluated=step == STEPS and lacks_evaluation(out, STEPS)),
            World(rank, rank, 2, torch.device("cpu"), "gloo", ""),
        )
        trainer.max_in_flight = lag
        start = trainer._start

        def told_before(step: int) -> None:
            nonlocal done
            if step == before and rank == told:
                os.kill(os.getpid(), signal.SIGTERM)
                while not stop.requested:
                    time.sleep(0.001)
            done += 1
            start(step)

        trainer._start = told_before  # type: ignore[method-assign]
        trainer.fit()
        return done, stop.requested
    finally:
        stop.uninstall()


@pytest.mark.parametrize(
    ("told", "lag"), [(1, 0), (0, 1), pytest.param(0, 0, marks=pytest.mark.full)]
)
def test_all_stop_when_one_is_told_to(
    pool: WorkerPool, token_folder: Path, tmp_path: Path, told: int, lag: int
) -> None:
    results = pool.run(2, train, token_folder, tmp_path, told, lag)
    done = 3 + lag
    assert results == [(done, told == 0), (done, told == 1)]
    (folder,) = (tmp_path / "checkpoints").iterdir()
    assert verify_checkpoint(folder).step == done


def test_the_evaluation_after_the_last_step_is_made_up_for(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    """A run that was told to stop in its last step is not done before it is evaluated."""
    alone, out = tmp_path / "alone", tmp_path / "out"
    pool.run(2, train, token_folder, alone, 9, 0)
    assert ": done, step 6" in health_of(alone).why
    pool.run(2, train, token_folder, out, 1, 0, STEPS - 1)
    assert ": stopped" in health_of(out).why
    assert lacks_evaluation(out, STEPS)
    assert pool.run(2, train, token_folder, out, 9, 0) == [(0, False)] * 2
    assert ": done, step 6" in health_of(out).why
    assert not lacks_evaluation(out, STEPS)
    assert read_metrics(out)[-1]["val_loss"] == read_metrics(alone)[-1]["val_loss"]
    assert read_metrics(out)[-1]["tokens"] == read_metrics(alone)[-1]["tokens"]
