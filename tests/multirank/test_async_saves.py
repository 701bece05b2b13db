"""Checkpoints that are written while training goes on hold what there was at their step."""

import threading
from pathlib import Path
from typing import Any, BinaryIO
from unittest.mock import patch

import pytest
import torch.distributed as dist

from gridformer.checkpoint import checkpoint
from gridformer.checkpoint import save as saving
from gridformer.checkpoint.manifest import Manifest, verify_checkpoint
from gridformer.train.metrics import read_metrics
from gridformer.train.plan import Plan
from gridformer.train.trainer import Trainer
from tests.support.marks import full_unless
from tests.support.multirank.layouts import n_of
from tests.support.multirank.layouts import name_of as name_of_layout
from tests.support.multirank.pool import RankFailed, WorkerPool
from tests.support.multirank.runs import STEPS, assert_same_bits, losses, plan_of, start_from, train

IN_BACKWARD = {"update": "in_backward", "clip_by": "layer"}
OFFLOAD = {"offload": "optimizer"}
FSDP: dict[str, Any] = {"scheme": "single", "dp": 2, "dp_mode": "fsdp"}
ZERO: dict[str, Any] = {"scheme": "single", "dp": 2, "dp_mode": "zero1"}
OPTIMUS: dict[str, Any] = {"scheme": "optimus", "rows": 2, "cols": 2}
Case = tuple[dict[str, Any], dict[str, Any]]
CASES: list[Case] = [
    *((FSDP, IN_BACKWARD), (ZERO, OFFLOAD), (OPTIMUS, {}), (FSDP, {})),
    *((ZERO, {}), (OPTIMUS, OFFLOAD), (OPTIMUS, IN_BACKWARD)),
    ({"scheme": "megatron", "cols": 2, "pp": 2, "micro_batches": 2}, {}),
    ({"scheme": "single"}, {**IN_BACKWARD, **OFFLOAD}),
    ({"scheme": "single"}, {"dtype": "bfloat16"}),
]


def name_of(case: Case) -> str:
    layout, how = case
    return "-".join([name_of_layout(layout), layout.get("dp_mode", ""), *map(str, how.values())])


def train_with_slow_files(plan: Plan) -> int:
    """Train on one rank; a file is written only after the step that follows its checkpoint.

    Returns how many files were written beside the training.
    """
    done, steps, beside, saved = threading.Condition(), 0, 0, [0]

    def step_of(trainer: Trainer, number: int) -> Any:
        nonlocal steps
        result = run_step(trainer, number)
        with done:
            steps += 1
            done.notify_all()
        return result

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


@pytest.mark.parametrize("case", full_unless(lambda case: case in CASES[:2], CASES), ids=name_of)
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
        assert_same_bits(waited, beside, step)
        verify_checkpoint(beside / f"checkpoints/step-{step:08d}")
    start_from(beside, resumed, 2)
    pool.run(n, train, plan_of(token_folder, resumed, layout, **how))
    assert losses(resumed) == losses(waited)
    assert_same_bits(waited, resumed)


def test_metrics_say_how_long_a_save_took_and_how_long_training_waited(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    pool.run(1, train_with_slow_files, plan_of(token_folder, tmp_path, {}, save_every=2))
    lines = {line["step"]: line for line in read_metrics(tmp_path)}
    assert [step for step, line in lines.items() if "save_stall_s" in line] == [3, 5]
    assert "save_s" not in lines[3], "the files of step 2 are written after step 3"
    took = lines[4].get("save_s") or lines[5]["save_s"]
    assert lines[3]["save_stall_s"] < took


def fail_beside(plan: Plan, failing: int) -> None:
    """Train on one rank; one raises in the fourth step, after a save whose files come late."""

    def step_of(trainer: Trainer, number: int) -> Any:
        if number == 3 and dist.get_rank() == failing:
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


@pytest.mark.parametrize("failing", [1, pytest.param(0, marks=pytest.mark.full)])
def test_an_error_on_one_rank_waits_for_the_save_under_way(
    pool: WorkerPool, token_folder: Path, tmp_path: Path, failing: int
) -> None:
    """Its peers are in a collective meanwhile, so they must not be needed for the save."""
    plan = plan_of(token_folder, tmp_path, {"scheme": "single", "dp": 2}, save_every=3)
    with pytest.raises(RankFailed, match="planted"):
        pool.run(2, fail_beside, plan, failing)
    (folder,) = (tmp_path / "checkpoints").iterdir()
    assert verify_checkpoint(folder).step == 3
