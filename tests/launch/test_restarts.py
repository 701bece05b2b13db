"""Runs that go on after a failure: in new processes, and with another number of them."""

import json
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from gridformer.config import RunConfig
from gridformer.launch import elastic
from gridformer.launch.elastic import layouts_for, with_processes
from gridformer.launch.plan import _machine
from gridformer.launch.run import launch_with_restarts, resumed, worker
from gridformer.memory import room
from gridformer.mesh.launch_env import rank_env
from gridformer.parallel.registry import describe_layout
from gridformer.train.metrics import read_metrics
from gridformer.utils.errors import ConfigError
from gridformer.utils.signals import StopPolicy
from tests.support.launch.dying import DIES_AT, dies_in_a_save, dies_once, fails_at_once
from tests.support.multirank.memory import a_run
from tests.support.multirank.runs import STEPS, assert_same_run, losses, plan_of, stored, tokens

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


WIDE = {"hidden_size": 48, "n_heads": 12}


def wanted(layout: dict[str, Any], **train: Any) -> RunConfig:
    return a_run({"rows": 1, "cols": 1, **layout}, WIDE, {"device": "cpu", **train})


@pytest.mark.parametrize(
    ("layout", "n", "becomes", "m"),
    [
        ({"scheme": "megatron", "cols": 2, "dp": 2}, 2, "megatron 1x2", 2),  # a replica less
        ({"scheme": "optimus", "rows": 2, "cols": 2, "pp": 2}, 4, "optimus 2x2", 1),
        ({"scheme": "single", "dp": 4}, 2, "dp=2", 2),
        ({"scheme": "single", "dp": 2, "dp_mode": "fsdp"}, 1, "single device", 2),
    ],
)
def test_what_a_layout_becomes(layout: dict[str, Any], n: int, becomes: str, m: int) -> None:
    run = wanted(layout, global_batch=24)
    found = next(layouts_for(run, n))
    assert describe_layout(found.layout) == becomes
    assert found.layout.n_processes == n
    assert found.layout.micro_batches == m, "no micro-batch is larger than before"
    assert found.train == run.train, "the global batch and all else stay"


def test_more_shards_are_preferred_to_fewer() -> None:
    run = wanted({"scheme": "single", "dp": 2, "pp": 2, "micro_batches": 4}, global_batch=24)
    found = [describe_layout(one.layout) for one in islice(layouts_for(run, 4), 3)]
    assert found == ["dp=2, pp=2", "pp=4", "dp=4"]


def test_some_processes_may_be_left_over(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No layout divides this batch and model over five processes."""
    run = wanted({"scheme": "single", "dp": 8}, global_batch=8)
    assert with_processes(run, 8) is run
    assert capfd.readouterr().err == ""
    found = with_processes(run, 5)
    assert found.layout.dp == 4
    said = capfd.readouterr().err
    assert said == (
        "gridformer: ELASTIC: 5 processes instead of 8: layout dp=8, m=1 becomes dp=4, m=2, with 1 "
        "left over; the global batch stays 8\n"
    )
    monkeypatch.setattr(elastic, "_fits", lambda run, room: False)
    with pytest.raises(ConfigError, match="no layout of at most 5 processes"):
        with_processes(run, 5)


@pytest.mark.parametrize("may_leave", [True, False])
def test_only_elastic_runs_leave_processes_over(
    may_leave: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_torchrun = {"RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    for name, value in {**of_torchrun, "MASTER_ADDR": "node01", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    run, place = wanted({"dp": 6}, global_batch=6, elastic=may_leave), rank_env()
    assert place is not None
    assert bool(json.loads(_machine(run, place))["problems"]) != may_leave


def test_memory_is_shared_by_the_processes_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by those that the run was meant for."""
    run = wanted({"scheme": "single", "dp": 64}, global_batch=64)
    monkeypatch.setattr(room, "free_memory", lambda: 9 << 30)
    assert with_processes(run, 1).layout.n_processes == 1


@pytest.mark.full
def test_the_planner_chooses_on_a_cluster() -> None:
    run = wanted({"scheme": "megatron", "cols": 4, "cluster": "dgx-h100"}, global_batch=24)
    found = next(layouts_for(run, 2))
    assert found.layout.n_processes == 2
    assert found.layout.cluster == "dgx-h100"
    assert found.train.global_batch == 24


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        {"scheme": "megatron", "cols": 2, "dp": 2},
        {"scheme": "optimus", "rows": 2, "cols": 2},
        {"scheme": "single", "pp": 4, "micro_batches": 4},
    ],
)
def test_a_run_goes_on_with_fewer_and_again_with_all(
    token_folder: Path, tmp_path: Path, layout: dict[str, Any]
) -> None:
    """Its losses are those of a run that kept all four processes."""
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    layout = {"rows": 1, "cols": 1, **layout}
    # The learning rate must not depend on the number of steps, which changes below.
    steps = {"device": "cpu", "save_every": 1, "elastic": True, "lr_schedule": "constant"}
    launch_with_restarts(worker, plan_of(token_folder, whole, layout, **steps), StopPolicy())
    policy = StopPolicy()
    for last, n in ((2, 4), (4, 2), (5, 4)):
        plan = plan_of(token_folder, moved, layout, **steps)
        train = plan.run.train.model_copy(update={"steps": last})
        run = with_processes(plan.run, n).model_copy(update={"train": train})
        other = plan_of(token_folder, moved, run.layout.model_dump(), **steps)
        run = other.run.model_copy(update={"train": train})
        object.__setattr__(other, "run", run)
        assert other.n_processes == n
        launch_with_restarts(worker, resumed(other), policy)
    assert_same_run(whole, moved)


def test_a_run_counts_gpus_only_if_processes_do_not_share_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = wanted({"dp": 4})
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert elastic.processes_present(run) == 4, "it uses none of them"
    run = run.model_copy(update={"train": run.train.model_copy(update={"device": "auto"})})
    assert elastic.processes_present(run) == 2
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert elastic.processes_present(run) == 4
