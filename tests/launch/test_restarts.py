"""A local run whose process dies goes on from its newest checkpoint, as if nothing had happened."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from gridformer.launch.run import launch_with_restarts, worker
from gridformer.train.metrics import read_metrics
from gridformer.utils.signals import StopPolicy
from tests.support.launch.dying import DIES_AT, dies_in_a_save, dies_once, fails_at_once
from tests.support.multirank.runs import STEPS, losses, plan_of, stored, tokens

TWO = {"scheme": "single", "dp": 2, "rows": 1, "cols": 1}
EACH: dict[str, Any] = {"save_every": 1, "device": "cpu"}


@pytest.mark.parametrize(
    "layout",
    [
        TWO,
        pytest.param({**TWO, "dp": 1}, marks=pytest.mark.full),
        pytest.param({"scheme": "optimus", "rows": 2, "cols": 2}, marks=pytest.mark.full),
    ],
)
def test_a_run_goes_on_after_a_process_was_killed(
    token_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], layout: dict[str, Any]
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for out, entrypoint in ((whole, worker), (cut, dies_once)):
        # A save beside training may not be complete on a busy machine when the process is killed.
        settings = EACH | {"max_restarts": 2, "save_every": 3, "async_save": False}
        plan = plan_of(token_folder, out, layout, **settings)
        launch_with_restarts(entrypoint, plan, StopPolicy())
    said = capfd.readouterr().err
    last = plan.n_processes - 1
    assert f"gridformer: attempt 2 of 3 resumes from step 3, as rank {last} (pid " in said
    assert "was killed by signal 9 (SIGKILL)" in said.splitlines()[-1]
    assert losses(cut) == losses(whole)
    assert len(losses(cut)) == STEPS
    assert tokens(cut) == tokens(whole)
    steps = [line["step"] for line in read_metrics(cut)]
    assert steps == [*range(STEPS + 1)], "each step once"
    for name, block in stored(whole).items():
        assert (stored(cut)[name] == block).all(), name


@pytest.mark.full
def test_a_run_goes_on_after_a_process_was_killed_while_it_saved(
    token_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The other rank waits in its save, in which no message can tell that the peer is gone."""
    layout = {**TWO, "dp_mode": "zero1"}  # both ranks write
    plan = plan_of(token_folder, tmp_path / "out", layout, **EACH | {"max_restarts": 1})
    began = time.monotonic()
    launch_with_restarts(dies_in_a_save, plan, StopPolicy())
    assert time.monotonic() - began < plan.run.train.timeout_s / 4
    said = capfd.readouterr().err
    assert f"attempt 2 of 2 resumes from step {STEPS - 1}, as rank 1 (pid " in said
    assert len(losses(tmp_path / "out")) == STEPS


def test_the_same_failure_again_ends_the_run(
    token_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Another process meets it, so the texts differ in a number."""
    plan = plan_of(token_folder, tmp_path, {**TWO, "dp": 1}, **EACH, max_restarts=9)
    with pytest.raises(SystemExit) as ended:
        launch_with_restarts(fails_at_once, plan, StopPolicy())
    assert ended.value.code == 1
    said = capfd.readouterr().err
    assert said.count("gridformer: attempt ") == 1
    assert f"attempt 2 of 10 resumes from step {DIES_AT}, as rank 0 failed: ValueError" in said
    assert f"two attempts in a row failed with the same error after step {DIES_AT}" in said
    assert "ValueError: the root cause" in said.splitlines()[-1]
