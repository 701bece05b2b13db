"""Checkpoints that are written while training goes on hold what there was at their step."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from gridformer.checkpoint import checkpoint
from gridformer.checkpoint import save as saving
from gridformer.checkpoint.copies import fetch_newest
from gridformer.checkpoint.manifest import Manifest, verify_checkpoint
from gridformer.checkpoint.store import RemoteStore
from gridformer.train.metrics import read_metrics
from gridformer.train.plan import Plan
from gridformer.train.trainer import Trainer
from tests.support.marks import full_unless
from tests.support.multirank.layouts import n_of
from tests.support.multirank.pool import RankFailed, WorkerPool
from tests.support.multirank.runs import STEPS, losses, plan_of, title, train

IN_BACKWARD = {"update": "in_backward", "clip_by": "layer"}
OFFLOAD = {"offload": "optimizer"}
FSDP: dict[str, Any] = {"scheme": "single", "dp": 2, "dp_mode": "fsdp"}
ZERO: dict[str, Any] = {"scheme": "single", "dp": 2, "dp_mode": "zero1"}
OPTIMUS: dict[str, Any] = {"scheme": "optimus", "rows": 2, "cols": 2}
Case = tuple[dict[str, Any], dict[str, Any]]
CASES: list[Case] = [
    (FSDP, IN_BACKWARD),
    (ZERO, OFFLOAD),
    (OPTIMUS, {}),
    (FSDP, {}),
    (ZERO, {}),
    (OPTIMUS, OFFLOAD),
    (OPTIMUS, IN_BACKWARD),
    ({"scheme": "megatron", "cols": 2, "pp": 2, "micro_batches": 2}, {}),
    ({"scheme": "single"}, {**IN_BACKWARD, **OFFLOAD}),
    ({"scheme": "single"}, {"dtype": "bfloat16"}),
]


def name_of(case: Case) -> str:
    layout, how = case
    return "-".join([title(layout), layout.get("dp_mode", ""), *map(str, how.values())])


def train_with_slow_files(plan: Plan) -> int:
    """Train on one rank; a file is written only after the step that follows its checkpoint.

    Returns how many files were written beside the training.
    """
    done, steps, beside, saved = threading.Condition(), 0, 0, [0]

    def step_of(trainer: Trainer, number: int) -> Any:
        nonlocal steps
        found = run_step(trainer, number)
        with done:
            steps += 1
            done.notify_all()
        return found

    def late(file: BinaryIO, blocks: Any) -> tuple[int, int]:
        nonlocal beside
        if threading.current_thread().name == "checkpoint":
            beside += 1
            step = saved[-1]
            with done:
                assert done.wait_for(lambda: steps > step, timeout=60)
        return write(file, blocks)

    def noted(step: int, *rest: Any) -> Manifest:
        saved.append(step)
        return manifest_of(step, *rest)

    run_step, write, manifest_of = Trainer._start, saving.write_file, checkpoint.manifest_of
    with (
        patch.object(Trainer, "_start", step_of),
        patch.object(saving, "write_file", late),
        patch.object(checkpoint, "manifest_of", noted),
    ):
        train(plan)
    return beside


def blocks_of(folder: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Return every block of a checkpoint by name and offset."""
    blocks = {}
    for path in verify_checkpoint(folder).files:
        with safe_open(folder / path, framework="pt") as file:
            offsets = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in file.keys():  # noqa: SIM118 - it is no dictionary
                blocks[name, str(offsets[name])] = file.get_tensor(name)
    return blocks


def assert_equal_bits(one: Path, other: Path) -> None:
    want, got = blocks_of(one), blocks_of(other)
    assert want.keys() == got.keys()
    for key in want:
        assert torch.equal(want[key], got[key]), (one.name, key)


@pytest.mark.parametrize("case", full_unless(lambda case: case in CASES[:3], CASES), ids=name_of)
def test_a_checkpoint_written_later_holds_the_values_of_its_step(
    pool: WorkerPool, token_folder: Path, tmp_path: Path, case: Case
) -> None:
    layout, how = case
    how = {"dtype": "float32", "save_every": 1, "keep_checkpoints": STEPS, **how}
    waited, beside, resumed = tmp_path / "waited", tmp_path / "beside", tmp_path / "resumed"
    n = n_of(layout)
    pool.run(n, train, plan_of(token_folder, waited, layout, **how, async_save=False))
    late = pool.run(n, train_with_slow_files, plan_of(token_folder, beside, layout, **how))
    assert set(late) == {STEPS - 1}, "the last save is waited for, the others are not"
    assert losses(beside) == losses(waited)
    for step in range(1, STEPS + 1):
        folder = f"checkpoints/step-{step:08d}"
        assert_equal_bits(waited / folder, beside / folder)
    folder = "checkpoints/step-00000002"
    shutil.copytree(beside / folder, resumed / folder)
    shutil.copy(beside / "metrics.jsonl", resumed)
    pool.run(n, train, plan_of(token_folder, resumed, layout, **how))
    assert losses(resumed) == losses(waited)
    folder = f"checkpoints/step-{STEPS:08d}"
    assert_equal_bits(waited / folder, resumed / folder)


def test_metrics_say_how_long_a_save_took_and_how_long_training_waited(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    pool.run(1, train_with_slow_files, plan_of(token_folder, tmp_path, {}, save_every=2))
    lines = {line["step"]: line for line in read_metrics(tmp_path)}
    assert [step for step, line in lines.items() if "save_stall_s" in line] == [3, 5]
    assert "save_s" not in lines[3], "the files of step 2 are written after step 3"
    took = lines[4].get("save_s") or lines[5]["save_s"]
    assert lines[3]["save_stall_s"] < took


def fail_beside(plan: Plan, failing: int, when: Callable[[int], bool]) -> None:
    """Train on one rank; one rank raises in the step after a save, whose files come late."""

    def step_of(trainer: Trainer, number: int) -> Any:
        if when(number) and dist.get_rank() == failing:
            raised.set()
            raise ValueError("planted")
        return run_step(trainer, number)

    def late(file: BinaryIO, blocks: Any) -> tuple[int, int]:
        if dist.get_rank() == failing:
            assert raised.wait(60)
        return write(file, blocks)

    raised = threading.Event()
    run_step, write = Trainer._start, saving.write_file
    with patch.object(Trainer, "_start", step_of), patch.object(saving, "write_file", late):
        train(plan)


def at_the_fourth(number: int) -> bool:
    return number == 3


@pytest.mark.parametrize("failing", [1, pytest.param(0, marks=pytest.mark.full)])
def test_an_error_on_one_rank_waits_for_the_save_under_way(
    pool: WorkerPool, token_folder: Path, tmp_path: Path, failing: int
) -> None:
    """Its peers are in a collective meanwhile, so they must not be needed for the save."""
    plan = plan_of(token_folder, tmp_path, {"scheme": "single", "dp": 2}, save_every=3)
    with pytest.raises(RankFailed, match="planted"):
        pool.run(2, fail_beside, plan, failing, at_the_fourth)
    (folder,) = (tmp_path / "checkpoints").iterdir()
    assert verify_checkpoint(folder).step == 3


@pytest.mark.full
def test_a_run_goes_on_elsewhere_from_copies_at_a_url(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    layout = {"scheme": "optimus", "rows": 2, "cols": 2}
    url = f"file://{tmp_path}/far"
    whole, here, there = tmp_path / "whole", tmp_path / "here", tmp_path / "there"
    how: dict[str, Any] = {"dtype": "float32", "save_every": 2}
    pool.run(4, train, plan_of(token_folder, whole, layout, **how))
    pool.run(4, train, plan_of(token_folder, here, layout, **how, checkpoint_to=url))
    assert RemoteStore(url).complete() == [f"step-{step:08d}" for step in (2, 4, STEPS)]
    RemoteStore(url).remove(f"step-{STEPS:08d}")
    assert fetch_newest(url, there) is not None
    shutil.copy(here / "metrics.jsonl", there)
    plan = plan_of(token_folder, there, layout, **how, checkpoint_to=url)
    assert plan.resume_step == 4
    pool.run(4, train, plan)
    assert losses(there) == losses(whole)
    folder = f"checkpoints/step-{STEPS:08d}"
    assert_equal_bits(whole / folder, there / folder)
    assert_equal_bits(whole / folder, tmp_path / "far" / f"step-{STEPS:08d}")
