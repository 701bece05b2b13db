"""Steps that are not finite: what is said of them, and what a run does, the same on any layout."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from gridformer.checkpoint import find
from gridformer.checkpoint.manifest import read_manifest
from gridformer.launch.verify_run import verify_run
from gridformer.parallel.pipeline import LOADING_RUNS, Executor
from gridformer.train.metrics import read_metrics
from gridformer.train.plan import Plan
from tests.support.marks import full_unless
from tests.support.multirank.faults import LAYER, poisoned, with_an_infinite_moment
from tests.support.multirank.layouts import n_of
from tests.support.multirank.nccl_path import on_nccl
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.runs import MIDDLE, STEPS, losses, plan_of, start_from, train

LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "megatron": {"scheme": "megatron", "cols": 2},
    "pipeline": {"pp": 2, "micro_batches": 2},
    "replicas": {"dp": 2, "dp_mode": "zero1"},
    "sharded": {"dp": 2, "dp_mode": "fsdp"},
    "grid": {"scheme": "optimus", "rows": 2, "cols": 2},
}
QUICK = full_unless(("pipeline", "sharded").__contains__, LAYOUTS)


SAID = {
    "output": f"the weights are finite, but the output of the forward pass is not, first after "
    f"'{LAYER}' on rank",
    "gradient": f"the loss is finite, but gradients are not, beginning with '{LAYER}.",
}


@pytest.mark.parametrize("layout", QUICK)
def test_all_ranks_say_where_it_began(
    pool: WorkerPool, token_folder: Path, tmp_path: Path, layout: str
) -> None:
    """The same on every layout and rank, and nothing is updated or saved."""
    where = " (stage 1)" if layout == "pipeline" else ""
    for what, said in SAID.items():
        plan = plan_of(token_folder, tmp_path / what, LAYOUTS[layout], save_every=0)
        told = pool.run(n_of(LAYOUTS[layout]), poisoned, plan, what, {2})
        assert len(set(told)) == 1, told
        assert "step 3: the loss is" in told[0]
        assert said in told[0]
        assert where in told[0]
        assert "nothing was updated" in told[0]
        assert "ower train.lr (0.003)" in told[0]
        assert find.latest(tmp_path / what) is None


def test_weights_data_and_devices_are_told_apart(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    plan = plan_of(token_folder, tmp_path / "weights", {}, save_every=0)
    (told,) = pool.run(1, poisoned, plan, "weights", {1}, 1)
    assert f"weights were not finite before this step, first '{LAYER}." in told
    assert "verify RUNDIR --finite" in told
    plan = plan_of(token_folder, tmp_path / "once", {}, save_every=0)
    (told,) = pool.run(1, poisoned, plan, "output", {1}, 1)
    assert "the same step computed once more is finite" in told
    assert "train.deterministic=true" in told


def steps_of(out: Path) -> list[int]:
    return [line["step"] for line in read_metrics(out)]


@pytest.mark.parametrize("layout", QUICK)
def test_skip_leaves_out_the_same_steps_everywhere(
    pool: WorkerPool, token_folder: Path, tmp_path: Path, layout: str
) -> None:
    """The losses of later steps equal those of one device, also after a resume."""
    settings: dict[str, Any] = {"on_divergence": "skip", "save_every": 1, "keep_checkpoints": 9}
    alone, out = tmp_path / "alone", tmp_path / "out"
    bad = {1, 2}
    for folder, of in ((alone, {}), (out, LAYOUTS[layout])):
        plan = plan_of(token_folder, folder, of, **settings)
        assert pool.run(n_of(of), poisoned, plan, "gradient", bad) == [""] * n_of(of)
    assert steps_of(out) == [*range(STEPS + 1)]
    want, got = losses(alone), losses(out)
    assert list(got) == [1, *range(4, STEPS + 1)]
    for step in want:
        assert got[step] == pytest.approx(want[step], rel=1e-9), step
    for line in read_metrics(out)[2:4]:
        assert line["left_out"].startswith("the loss is finite, but gradients are not")
    last = find.latest(out)
    assert last is not None
    assert read_manifest(last).skipped == len(bad)
    assert read_manifest(last).tokens == read_metrics(out)[-1]["tokens"]
    for folder in (alone, out):
        counted = [line["tokens"] for line in read_metrics(folder)]
        assert counted == [24 * 12 * step for step in range(STEPS + 1)], "those left out, too"
    moved = tmp_path / "moved"
    start_from(out, moved)
    plan = plan_of(token_folder, moved, {}, **settings)
    assert plan.resume_step == MIDDLE
    assert plan.resume is not None
    assert read_manifest(plan.resume).divergences.in_a_row == 2
    pool.run(1, poisoned, plan, "gradient", bad)
    for step in want:
        assert losses(moved)[step] == pytest.approx(want[step], rel=1e-9), step


def test_too_many_left_out_steps_end_the_run(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"on_divergence": "skip", "divergences": 2, "save_every": 0}
    plan = plan_of(token_folder, tmp_path, {}, **settings)
    (told,) = pool.run(1, poisoned, plan, "output", {0, 2, 3, 4})
    assert "step 5: " in told
    assert "Left out before it: 2 steps" in told


@pytest.mark.parametrize("layout", QUICK)
def test_rollback_goes_back_with_a_lower_rate(
    pool: WorkerPool, token_folder: Path, tmp_path: Path, layout: str
) -> None:
    """What comes after it equals a run that resumes there with that rate."""
    settings: dict[str, Any] = {"on_divergence": "rollback", "save_every": 1}
    settings |= {"keep_checkpoints": 9, "rollback_checkpoints": 2, "rollback_lr": 0.25}
    settings |= {"lr_schedule": "constant", "warmup_steps": 0}
    alone, out = tmp_path / "alone", tmp_path / "out"
    bad = {4}
    for folder, of in ((alone, {}), (out, LAYOUTS[layout])):
        plan = plan_of(token_folder, folder, of, **settings)
        # Each rank meets it once for each micro-batch, in the step and when it is repeated.
        times = 2 * (2 if "pp" in of else 1)
        assert pool.run(n_of(of), poisoned, plan, "output", bad, times) == [""] * n_of(of)
    want, got = losses(alone), losses(out)
    assert list(got) == [*range(1, STEPS + 1)]
    assert steps_of(out) == [*range(STEPS + 1)]
    for step in want:
        assert got[step] == pytest.approx(want[step], rel=1e-9), step
    lines = read_metrics(out)
    assert [line["lr"] for line in lines[1:]] == [0.003] * MIDDLE + [0.00075] * (STEPS - MIDDLE)
    assert [line.get("rollbacks") for line in lines[1:]] == [None] * MIDDLE + [1, 1]
    kept = {path.name for path in (out / "checkpoints").iterdir()}
    assert "rolled-back-step-00000004" in kept
    last = find.latest(out)
    assert last is not None
    assert read_manifest(last).divergences.rollbacks == 1
    assert read_manifest(last).divergences.lr_factor == 0.25
    moved = tmp_path / "moved"
    start_from(out, moved)
    plan = plan_of(token_folder, moved, {}, **{**settings, "lr": 0.00075})
    pool.run(1, train, plan)
    for step in (4, 5):
        assert losses(moved)[step] == pytest.approx(want[step], rel=1e-9), step


def test_the_lower_rate_stays_after_a_resume_and_becomes_lower_still(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    """Step 3 fails once in the first run, and step 5 once in the one that resumes after step 3."""
    settings: dict[str, Any] = {"on_divergence": "rollback", "save_every": 1, "eval_batches": 1}
    settings |= {"rollback_lr": 0.25, "lr_schedule": "constant", "warmup_steps": 0}
    for steps, bad in ((3, 2), (6, 4)):
        plan = plan_of(token_folder, tmp_path, {}, **settings, steps=steps)
        assert pool.run(1, poisoned, plan, "output", {bad}, 2) == [""]
    lines = read_metrics(tmp_path)[-6:]
    assert [line["step"] for line in lines] == [*range(1, 7)]
    lower, lowest = 0.003 / 4, 0.003 / 16
    rates = [0.003, 0.003, lower, lower, lowest, lowest]
    assert [line["lr"] for line in lines] == pytest.approx(rates, rel=1e-12)
    assert [line.get("rollbacks") for line in lines] == [None, None, 1, 1, 2, 2]


def test_rollbacks_end(pool: WorkerPool, token_folder: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"on_divergence": "rollback", "divergences": 2, "save_every": 2}
    plan = plan_of(token_folder, tmp_path / "none", {}, **settings)
    (told,) = pool.run(1, poisoned, plan, "output", {1})
    assert "There is no checkpoint yet to go back to" in told
    plan = plan_of(token_folder, tmp_path / "always", {}, **settings)
    (told,) = pool.run(1, poisoned, plan, "output", {3})
    assert "The run has gone back 2 times (train.divergences=2)" in told


@pytest.mark.parametrize("layout", QUICK)
def test_no_checkpoint_has_moments_that_are_not_finite(
    pool: WorkerPool, token_folder: Path, tmp_path: Path, layout: str
) -> None:
    """Adam divides by their roots, so that its updates are 0 and all losses are finite."""
    for kind in ("stop", "skip", "rollback"):
        settings: dict[str, Any] = {"save_every": 1, "on_divergence": kind}
        plan = plan_of(token_folder, tmp_path / kind, LAYOUTS[layout], **settings)
        (told, *_) = pool.run(n_of(LAYOUTS[layout]), with_an_infinite_moment, plan, 2)
        if kind != "rollback":
            assert "step 3: what is to be saved is not finite, so it is not saved; 'exp_avg" in told
            assert told.endswith("train.on_divergence=rollback goes on by itself")
        steps = [int(folder.name[5:]) for folder in find.complete(tmp_path / kind)]
        assert steps[-1] == (STEPS if kind == "rollback" else 2), told
        assert all(one.ok for one in verify_run(tmp_path / kind, finite=True))


def test_rollback_stays_within_the_data_that_it_reads(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    """After `data.restart` there are checkpoints of the data before it, which are left alone."""
    settings: dict[str, Any] = {"on_divergence": "rollback", "save_every": 1}
    settings |= {"keep_checkpoints": 9, "rollback_checkpoints": 3}
    (told,) = pool.run(
        1, poisoned, plan_of(token_folder, tmp_path, {}, **settings, steps=2), "", {9}
    )
    assert told == ""
    plan = plan_of(token_folder, tmp_path, {}, **settings)
    assert plan.resume_step == 2
    (told,) = pool.run(1, poisoned, replace(plan, data_start=2), "output", {3}, 2)
    assert told == ""
    assert steps_of(tmp_path) == [*range(STEPS + 1)]
    aside = sorted(path.name for path in (tmp_path / "checkpoints").glob("rolled-back-*"))
    assert aside == ["rolled-back-step-00000003"]


def test_what_looks_for_the_cause_sends_through_the_host(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    """Its kernels are loaded then, while a receive over NCCL would occupy the GPU."""
    plan = plan_of(token_folder, tmp_path, LAYOUTS["pipeline"], save_every=0, eval_batches=1)
    for runs in pool.run(2, on_nccl, ways_of_runs, plan, loading_runs=LOADING_RUNS):
        training = [loads for is_training, loads in runs if is_training]
        assert training == [True, True, False, False, True], "the last one repeats the fourth"


def ways_of_runs(plan: Plan) -> list[tuple[bool, bool]]:
    """Train with a bad fourth step; return of each run whether it trains and may load kernels."""
    found: list[tuple[bool, bool]] = []
    note = Executor.note_run

    def noted(self: Executor, training: bool, work: Any) -> None:
        found.append((training, self.loads(training, work)))
        note(self, training, work)

    with patch.object(Executor, "note_run", noted):
        poisoned(plan, "output", {3})
    return found
