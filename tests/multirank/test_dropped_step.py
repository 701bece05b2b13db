"""A run that is told to stop inside a step drops it, saves what was before it, and goes on exactly.

The step is dropped at the same micro-batch on all ranks, whatever they send to each other.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from gridformer.checkpoint import find
from gridformer.checkpoint.manifest import verify
from gridformer.train import ending
from gridformer.train.ending import Ending
from gridformer.train.trainer import Trainer
from gridformer.utils import signals as stopping
from tests.support.multirank.layouts import name_of
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.runs import STEPS, losses, plan_of, stored, train

MICRO = 6
LAYOUTS: list[dict[str, Any]] = [
    {"scheme": "single", "dp": 2},
    {"scheme": "megatron", "cols": 2, "pp": 2},
    {"scheme": "single", "dp": 2, "dp_mode": "fsdp"},
    {"scheme": "single", "pp": 2, "stages_per_rank": 2},
    {"scheme": "optimus", "rows": 2, "cols": 2},
]


def told(plan: Any, store: Path, step: int, border: int) -> tuple[int, int, str]:
    """Send SIGTERM to a rank inside a step; return micro-batches left out, exit code and cause.

    It is a rank that needs no message of a rank which waits at the same border.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    chosen = 0 if plan.run.layout.pp > 1 else size - 1
    policy = stopping.StopPolicy(grace_s=600.0, requeue=("SIGTERM",))
    stopping.install().uninstall()  # that of an earlier run in this process
    stop = stopping.install(policy)
    steps, left_out = 0, 0

    def ending_of(self: Trainer) -> Ending:
        return Ending(self.stop, rank, size, dist.FileStore(str(store)))

    passes = Ending.at

    def at(self: Ending, number: int) -> bool:
        nonlocal steps, left_out
        steps += number == 0 and self._kind == "step"
        if (steps, number, rank) == (step, border, chosen) and not stop.requested:
            os.kill(os.getpid(), signal.SIGTERM)
            while not stop.requested:
                time.sleep(0.001)
        if steps == step and number == border:
            while self._promise is None:  # all have heard of it
                time.sleep(0.001)
        ends = passes(self, number)
        left_out = left_out or (MICRO - number) * ends
        return ends

    try:
        with (
            patch.object(Trainer, "_ending", ending_of),
            patch.object(Ending, "at", at),
            patch.object(Ending, "_rest_s", lambda self: float("inf")),
            patch.object(ending, "_LOOK_S", 0.01),
        ):
            train(plan)
        return left_out, stop.exit_code, stop.cause
    finally:
        stop.uninstall()


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
    assert verify(folder).step == 2, "the steps before it are saved"
    pool.run(n, train, plan_of(token_folder, cut, layout, **settings))
    assert losses(cut) == losses(whole)
    assert len(losses(cut)) == STEPS
    for name, block in stored(whole).items():
        assert (stored(cut)[name] == block).all(), name
