"""A run makes its batches ahead, and neither a failure nor its end leaves a thread behind."""

from __future__ import annotations

import shutil
import threading
import traceback
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from gridformer.data.samples.batches import ShuffledBatches
from gridformer.data.samples.order import Rows
from gridformer.data.samples.sample import Arrays
from gridformer.train.heartbeat import health_of
from gridformer.train.metrics import read_metrics
from gridformer.train.plan import Plan
from gridformer.utils.errors import DataError
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.runs import plan_of, train


def reading(plan: Plan, damaged: int = -1) -> tuple[list[int], list[int], list[str]]:
    """Run one rank; return the training and validation batches it made, and an error's frames."""
    made: dict[str, list[int]] = {"train": [], "val": []}
    whole = ShuffledBatches.batch

    def batch(self: ShuffledBatches, step: int, rows: Rows | None = None) -> Arrays:
        name = self.purpose.partition("/")[2]
        made[name].append(step)
        if (name, step) == ("train", damaged):
            raise DataError("a damaged file")
        return whole(self, step, rows)

    frames: list[str] = []
    with patch.object(ShuffledBatches, "batch", batch):
        try:
            train(plan)
        except DataError as error:
            frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert not [thread for thread in threading.enumerate() if thread.name == "batches"]
    return made["train"], made["val"], frames


def test_a_run_reads_its_batches_and_no_others(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    """It evaluates before the first step, after the third and after the last."""
    settings: dict[str, Any] = {"steps": 5, "eval_every": 3, "eval_batches": 2}
    plan = plan_of(token_folder, tmp_path, {"micro_batches": 4}, **settings)
    ((trained, validated, _),) = pool.run(1, reading, plan)
    assert trained == [*range(5)], "each once, and none after the last step"
    assert validated == [0, 1] * 3
    assert ": done, step 5, loss" in health_of(tmp_path).why


def test_a_damaged_batch_ends_the_run_at_its_step(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    """The steps before it are taken, and the traceback is that of the thread that read it."""
    plan = plan_of(token_folder, tmp_path, {}, steps=9, eval_batches=1)
    ((trained, _, frames),) = pool.run(1, reading, plan, 3)
    assert trained == [0, 1, 2, 3]
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2, 3]
    assert frames[-1] == "batch"
    assert "fit" in frames
    assert ": failed, step 3, loss" in health_of(tmp_path).why


@pytest.mark.full
def test_a_resumed_run_reads_on(pool: WorkerPool, token_folder: Path, tmp_path: Path) -> None:
    for steps, want in ((2, [0, 1]), (5, [2, 3, 4])):
        plan = plan_of(token_folder, tmp_path, {}, steps=steps, eval_batches=1)
        ((trained, _, _),) = pool.run(1, reading, plan)
        assert trained == want


def test_the_tokenizer_may_lie_in_the_run_directory(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    """As for token files of another program, whose tokenizer an earlier run has kept."""
    own = tmp_path / "own"
    shutil.copytree(token_folder, own)
    pool.run(1, train, plan_of(own, own, {}, steps=1, eval_batches=1))
    kept, source = (folder / "tokenizer.json" for folder in (own, token_folder))
    assert kept.read_bytes() == source.read_bytes()
