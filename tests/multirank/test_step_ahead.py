"""Runs that are a step ahead of what they write, and steps that are dropped inside."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from gridformer.checkpoint import find
from gridformer.checkpoint.manifest import read_manifest, verify_checkpoint
from gridformer.checkpoint.saver import Saver
from gridformer.config import TrainConfig
from gridformer.train.in_flight_steps import StartedStep, max_in_flight
from gridformer.train.metrics import read_metrics
from gridformer.train.plan import Plan
from gridformer.train.step import Stepper
from tests.support.marks import full_unless
from tests.support.multirank.faults import MICRO, poisoned, told
from tests.support.multirank.layouts import n_of, name_of
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.runs import (
    MIDDLE,
    STEPS,
    losses,
    plan_of,
    stored,
    train,
    train_a_step_ahead,
)

LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "sharded": {"dp": 2, "dp_mode": "fsdp"},
    "pipeline": {"pp": 2, "micro_batches": 2},
    "grid": {"scheme": "optimus", "rows": 2, "cols": 2},
}
TIMES = {
    "tokens_per_s", "step_time_s", "data_wait_s", "model_tflops", "hardware_tflops", "save_s",
    "save_stall_s",
}  # fmt: skip


def recorded(plan: Plan) -> list[str]:
    """Train; return what the trainer did, in order."""
    did: list[str] = []
    start, result, evaluate, save = Stepper.start, StartedStep.result, Stepper.evaluate, Saver.save

    def noted(name: str, whole: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            did.append(f"start {args[1]}" if name == "start" else name)
            return whole(*args, **options)

        return call

    def noted_result(self: StartedStep) -> Any:
        did.append(f"read {self.step}")
        return result(self)

    with (
        patch.object(Stepper, "start", noted("start", start)),
        patch.object(StartedStep, "result", noted_result),
        patch.object(Stepper, "evaluate", noted("evaluate", evaluate)),
        patch.object(Saver, "save", noted("save", save)),
    ):
        train(plan)
    return did


def without_times(out: Path) -> list[dict[str, Any]]:
    lines = read_metrics(out)
    return [{key: line[key] for key in line if key not in TIMES} for line in lines]


def assert_same(ahead: Path, waits: Path) -> None:
    """Check that two finished runs have the same metrics and the same last checkpoint."""
    assert without_times(ahead) == without_times(waits)
    got, want = stored(ahead), stored(waits)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("layout", full_unless(("single",).__contains__, LAYOUTS))
def test_a_run_a_step_ahead_is_the_same_run(
    pool: WorkerPool, token_folder: Path, tmp_path: Path, layout: str
) -> None:
    """Nothing is under way while it evaluates or saves."""
    n, ahead, waits = n_of(LAYOUTS[layout]), tmp_path / "ahead", tmp_path / "waits"
    plans = [plan_of(token_folder, out, LAYOUTS[layout], eval_every=3) for out in (ahead, waits)]
    did = pool.run(n, train_a_step_ahead, recorded, plans[0])
    pool.run(n, train, plans[1])
    # after steps 3 and 5 it evaluates and saves
    want = ["evaluate"]
    want += ["start 0", "start 1", "read 0", "start 2", "read 1", "read 2", "evaluate", "save"]
    want += ["start 3", "start 4", "read 3", "read 4", "evaluate", "save"]
    assert did == [want] * n
    assert_same(ahead, waits)


@pytest.mark.parametrize("layout", full_unless(("sharded",).__contains__, LAYOUTS))
@pytest.mark.parametrize("on_divergence", ["skip", "rollback"])
def test_what_started_after_a_bad_step_has_changed_nothing(
    pool: WorkerPool, token_folder: Path, tmp_path: Path, layout: str, on_divergence: str
) -> None:
    of, ahead, waits = LAYOUTS[layout], tmp_path / "ahead", tmp_path / "waits"
    plans = [plan_of(token_folder, out, of, on_divergence=on_divergence) for out in (ahead, waits)]
    # In each step a rank meets it once for each micro-batch, and again when the step is repeated
    # to find the cause; after going back to the checkpoint, the step is finite.
    times = 2 * of.get("micro_batches", 1)
    poison: tuple[Any, ...] = (
        ("gradient", {1, 3}) if on_divergence == "skip" else ("output", {MIDDLE}, times)
    )
    n = n_of(of)
    assert pool.run(n, train_a_step_ahead, poisoned, plans[0], *poison) == [""] * n
    assert pool.run(n, poisoned, plans[1], *poison) == [""] * n
    assert_same(ahead, waits)
    last = find.latest(ahead)
    assert last is not None
    manifest = read_manifest(last)
    assert manifest.skipped == (2 if on_divergence == "skip" else 0)
    assert manifest.divergences.rollbacks == (0 if on_divergence == "skip" else 1)


def test_a_bad_step_ends_the_run_with_the_steps_before_it_written(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    plan = plan_of(token_folder, tmp_path, {}, save_every=0)
    (said,) = pool.run(1, train_a_step_ahead, poisoned, plan, "output", {2})
    assert "step 3: the loss is" in said
    assert "nothing was updated" in said
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2]
    assert find.latest(tmp_path) is None


@pytest.mark.parametrize("on_divergence", ["skip", "stop"])
def test_the_step_before_a_bad_one_is_written_where_both_are_waited_for(
    pool: WorkerPool, token_folder: Path, tmp_path: Path, on_divergence: str
) -> None:
    """Before a save there is nothing under way."""
    plan = plan_of(token_folder, tmp_path, {}, save_every=3, on_divergence=on_divergence)
    pool.run(1, train_a_step_ahead, poisoned, plan, "gradient", {2})
    written = [line["step"] for line in read_metrics(tmp_path)]
    assert written == [*range(6 if on_divergence == "skip" else 3)]


def test_gpus_train_a_step_ahead_unless_the_host_waits_anyway() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert max_in_flight(TrainConfig(), cuda) == 1
    assert max_in_flight(TrainConfig(dtype="float16"), cuda) == 0
    assert max_in_flight(TrainConfig(update="in_backward", clip_by="layer"), cuda) == 0
    assert max_in_flight(TrainConfig(), cpu) == 0


DROPPED_ON: list[dict[str, Any]] = [
    {"scheme": "single", "dp": 2},
    {"scheme": "megatron", "cols": 2, "pp": 2},
    {"scheme": "single", "dp": 2, "dp_mode": "fsdp"},
    {"scheme": "single", "pp": 2, "stages_per_rank": 2},
    {"scheme": "optimus", "rows": 2, "cols": 2},
]


@pytest.mark.parametrize("ahead", [False, True], ids=["waiting", "ahead"])
@pytest.mark.parametrize(
    "layout", full_unless(lambda one: one is DROPPED_ON[1], DROPPED_ON), ids=name_of
)
def test_a_step_is_dropped_and_the_run_goes_on_exactly(
    pool: WorkerPool, token_folder: Path, tmp_path: Path, layout: dict[str, Any], ahead: bool
) -> None:
    """Also while the step before it is under way, which counts: its line and weights are saved."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    layout = {"rows": 1, "cols": 1, "micro_batches": MICRO, **layout}
    settings: dict[str, Any] = {"save_every": 0}
    over = (train_a_step_ahead,) if ahead else ()
    n = plan_of(token_folder, whole, layout, **settings).n_processes
    pool.run(n, train, plan_of(token_folder, whole, layout, **settings))
    plan = plan_of(token_folder, cut, layout, **settings)
    ends = pool.run(n, *over, told, plan, tmp_path / "store", 3, 2)
    assert len({*ends}) == 1, "all stop for the same reason with the same exit code"
    assert 0 < ends[0][0] < MICRO, "the step was dropped inside it"
    assert ends[0][1:] == (75, "SIGTERM")
    assert [line["step"] for line in read_metrics(cut)] == [0, 1, 2]
    folder = find.latest(cut)
    assert folder is not None
    assert verify_checkpoint(folder).step == 2, "the steps before it are saved"
    pool.run(n, *over, train, plan_of(token_folder, cut, layout, **settings))
    assert losses(cut) == losses(whole)
    assert len(losses(cut)) == STEPS
    assert_same(cut, whole)
