"""Loggers of services: joined again on resume, no step twice, a run of its own after a rollback.

Small fakes take the place of the packages, so nothing is sent to anybody.

Real runs log to the real packages where they are installed, which `make test` does not do:
`pip install -e '.[wandb,mlflow]'` adds them. Nothing is sent: Weights & Biases runs offline, and
MLflow writes to a file.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from gridformer.config import RunConfig, parse_run
from gridformer.launch.plan import check_run
from gridformer.train.callbacks import Callback, RunEnd, RunStart
from gridformer.train.loggers import missing_packages, open_loggers
from gridformer.train.metrics import METRICS, read_metrics
from gridformer.utils.errors import ConfigError
from tests.support.commands import python_alone

RUN = {
    "name": "mine",
    "model": {"family": "gpt2", "n_layers": 1, "hidden_size": 8, "n_heads": 2, "vocab_size": 8},
    "data": {"path": "tokens"},
}


class FakeWandb(ModuleType):
    """A fake wandb: runs by id, with the steps logged to each."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: dict[str, dict[str, Any]] = {}
        self.has_key = False
        self.Settings = SimpleNamespace

    def login(self, prompt: bool, verify: bool) -> bool:
        assert not prompt, "a run must not wait for someone who types"
        assert not verify, "tests send nothing"
        return self.has_key

    def init(self, **about: Any) -> Any:
        run_id = about["id"] or f"id{len(self.runs)}"
        run = self.runs.setdefault(run_id, {"steps": [], "exits": []})
        run["about"] = about

        def log(values: dict[str, float], step: int) -> None:
            run["steps"].append(step)
            run["last"] = values

        return SimpleNamespace(
            id=run_id,
            step=max(run["steps"], default=-1) + 1,
            log=log,
            summary=run,
            config=SimpleNamespace(update=lambda config, allow_val_change: None),
            finish=lambda exit_code: run["exits"].append(exit_code),
        )


class FakeMLflow:
    """A fake mlflow.tracking.MlflowClient."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.uri = ""

    def __call__(self, tracking_uri: str) -> FakeMLflow:
        self.uri = tracking_uri
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        return None

    def create_experiment(self, name: str, artifact_location: str | None) -> str:
        return name

    def create_run(self, experiment: str, run_name: str) -> Any:
        run_id = f"id{len(self.runs)}"
        self.runs[run_id] = {"name": run_name, "status": "RUNNING", "metrics": [], "params": []}
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def update_run(self, run_id: str, status: str) -> None:
        self.runs[run_id]["status"] = status

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        self.runs[run_id][key] = value

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        self.runs[run_id]["metrics"] += metrics
        self.runs[run_id]["params"] += params

    def get_metric_history(self, run_id: str, key: str) -> list[Any]:
        steps = [step for name, _, _, step in self.runs[run_id]["metrics"] if name == key]
        return [SimpleNamespace(step=step) for step in steps]

    def set_terminated(self, run_id: str, status: str) -> None:
        self.runs[run_id]["status"] = status

    def steps(self, run_id: str) -> list[int]:
        return [metric.step for metric in self.get_metric_history(run_id, "tokens")]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT", "WANDB_RUN_GROUP"):
        monkeypatch.delenv(name, raising=False)
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMLflow:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    client = FakeMLflow()
    for name, content in (
        ("mlflow", {}),
        ("mlflow.tracking", {"MlflowClient": client}),
        ("mlflow.entities", {"Metric": lambda *one: one, "Param": lambda *one: one}),
    ):
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return client


def run_of(name: str) -> RunConfig:
    return parse_run({**RUN, "train": {"loggers": [name]}})


def opened(name: str, folder: Path, resume_step: int = 0) -> Callback:
    """Open the logger of a process that starts or resumes, as a run does."""
    run = run_of(name)
    kept = [json.dumps(line_of(step)) + "\n" for step in range(resume_step + 1)]
    (folder / METRICS).write_text("".join(kept) if resume_step else "")
    ([], [logger]) = open_loggers(run, folder, resume_step)
    logger.on_start(RunStart(run, folder, resume_step, "single", 1, "cpu"))
    return logger


def line_of(step: int) -> dict[str, Any]:
    loss = {"loss": 5.0} if step else {}  # before the first step there is only an evaluation
    return {"step": step, **loss, "tokens": 8 * step, "left_out": "why"}


def steps(logger: Callback, first: int, last: int) -> None:
    for step in range(first, last + 1):
        logger.on_step(line_of(step))


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_resumed_run_is_joined_and_no_step_is_logged_twice(
    name: str, tmp_path: Path, wandb: FakeWandb, mlflow: FakeMLflow
) -> None:
    """The first process is killed in step 5, after the checkpoint of step 3."""
    wandb.has_key = True
    known = wandb.runs if name == "wandb" else mlflow.runs
    first = opened(name, tmp_path)
    steps(first, 0, 5)
    first.on_evaluation(5, {})
    second = opened(name, tmp_path, 3)
    steps(second, 4, 7)
    second.on_end(RunEnd("done", 7, 7))
    second.close()
    assert [*known] == ["id0"]
    logged = known["id0"]["steps"] if name == "wandb" else mlflow.steps("id0")
    assert logged == [0, 1, 2, 3, 4, 5, 6, 7]
    third = opened(name, tmp_path)  # begun anew in the same folder
    third.close()
    assert [*known] == ["id0", "id1"]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_what_a_killed_process_had_not_sent_is_logged_by_the_next(
    name: str, tmp_path: Path, wandb: FakeWandb, mlflow: FakeMLflow
) -> None:
    wandb.has_key = True
    steps(opened(name, tmp_path), 0, 5)
    if name == "wandb":
        wandb.runs["id0"]["steps"] = [0, 1]  # it sends in a process of its own
    steps(opened(name, tmp_path, 3), 4, 5)
    resumed = opened(name, tmp_path, 5)
    resumed.close()
    logged = wandb.runs["id0"]["steps"] if name == "wandb" else mlflow.steps("id0")
    assert logged == [0, 1, 2, 3, 4, 5]


def test_an_offline_run_goes_on_after_the_last_step_that_it_has_completed(
    tmp_path: Path, wandb: FakeWandb
) -> None:
    first = opened("wandb", tmp_path)
    steps(first, 0, 4)
    first.on_end(RunEnd("stopped", 4, 4))
    steps(opened("wandb", tmp_path, 4), 5, 6)  # killed: what it has written may be lost
    steps(opened("wandb", tmp_path, 5), 6, 7)
    assert wandb.runs["id0"]["steps"] == [0, 1, 2, 3, 4, 5, 6, 5, 6, 7]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_rollback_goes_on_in_a_run_of_its_own(
    name: str, tmp_path: Path, wandb: FakeWandb, mlflow: FakeMLflow
) -> None:
    wandb.has_key = True
    logger = opened(name, tmp_path)
    steps(logger, 0, 4)
    logger.on_diverged(5, "it is nan; left out", None)
    logger.on_diverged(5, "it is nan; going back", 2)
    steps(logger, 3, 5)
    resumed = opened(name, tmp_path, 4)
    steps(resumed, 5, 6)
    resumed.close()
    if name == "wandb":
        assert [run["steps"] for run in wandb.runs.values()] == [[0, 1, 2, 3, 4], [3, 4, 5, 6]]
        assert wandb.runs["id1"]["about"]["name"] == "mine, part 2"
        assert wandb.runs["id0"]["exits"] == [1]
    else:
        assert [mlflow.steps(run) for run in mlflow.runs] == [[0, 1, 2, 3, 4], [3, 4, 5, 6]]
        assert mlflow.runs["id1"]["name"] == "mine, part 2"
        assert mlflow.runs["id0"]["status"] == "FAILED"


def test_wandb_is_offline_without_a_login_and_does_what_its_variables_say(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened("wandb", tmp_path).close()
    about = wandb.runs["id0"]["about"]
    assert (about["mode"], about["project"], about["dir"]) == (
        "offline",
        "gridformer",
        str(tmp_path),
    )
    wandb.has_key = True
    opened("wandb", tmp_path).close()
    assert wandb.runs["id1"]["about"]["mode"] == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    opened("wandb", tmp_path).close()
    about = wandb.runs["id2"]["about"]
    assert (about["mode"], about["project"]) == ("disabled", "theirs")


def test_mlflow_writes_beside_the_run_directories_without_a_server(
    tmp_path: Path, mlflow: FakeMLflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    opened("mlflow", folder)
    assert mlflow.uri == f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert ("train.lr", "0.0003") in mlflow.runs["id0"]["params"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    opened("mlflow", folder)
    assert mlflow.uri == "http://127.0.0.1:1"


def test_a_missing_package_is_named_before_a_process_starts(token_folder: Path) -> None:
    assert missing_packages(["tensorboard"]) == []
    words = ["model.n_layers=1", f"data.path={token_folder}", "train.loggers=[wandb]"]
    with (
        patch.object(importlib.util, "find_spec", return_value=None),
        pytest.raises(ConfigError, match=r"train.loggers=wandb needs wandb: pip install"),
    ):
        check_run("demo", [*words, "train.device=cpu"])


STEPS = 20
REPRODUCED = ("loss", "grad_norm", "lr", "tokens", "val_loss")  # equal whenever a step is run
# The first rank of a run of two processes is killed after a step, once it has metrics of it.
SCRIPT = """
import os, signal, sys
from pathlib import Path

from gridformer.launch.run import train
from gridformer.train import Callback


class Killed(Callback):
    def on_step(self, metrics):
        if metrics["step"] == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    train(sys.argv[1], out=Path(sys.argv[2]), callbacks=[Killed()])
"""


def start(logger: str, data: Path, tmp_path: Path, killed_in: int) -> Path:
    """Start or resume a run, which is killed in a step; return its run directory."""
    (tmp_path / "run.py").write_text(SCRIPT)
    hidden = ("WANDB_", "MLFLOW_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
    sections = {
        "name": "mine",
        "model": {"n_layers": 1, "hidden_size": 16, "n_heads": 2, "max_seq_len": 16},
        "data": {"path": str(data)},
        "layout": {"scheme": "megatron", "cols": 2},
        "train": {
            **{"steps": STEPS, "global_batch": 4, "eval_every": 4, "eval_batches": 1},
            **{"save_every": 2, "loggers": [logger], "device": "cpu"},
        },
    }
    file, out = tmp_path / "mine.yaml", tmp_path / "runs" / "mine"
    file.write_text(json.dumps(sections))
    words = tmp_path / "run.py", file, out, str(killed_in)
    done = python_alone(*words, env={**env, "WANDB_MODE": "offline"})
    assert "nothing more is sent" not in done.stdout + done.stderr, done.stdout + done.stderr
    assert (done.returncode == 0) == (killed_in > STEPS), done.stderr
    return out


def mlflow_values(out: Path, name: str) -> list[tuple[int, float]]:
    """Return the steps and values of a metric of the only run in the file, which is finished."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{out.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("gridformer")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    assert run.data.params["train.steps"] == str(STEPS)
    assert run.data.tags["gridformer.layout"] == "megatron 1x2"
    return sorted((one.step, one.value) for one in client.get_metric_history(run.info.run_id, name))


@pytest.mark.full
@pytest.mark.parametrize("logger", ["wandb", "mlflow"])
def test_one_run_has_every_step_once(logger: str, token_folder: Path, tmp_path: Path) -> None:
    """A checkpoint is complete when the one after it begins."""
    pytest.importorskip(logger, reason=f"pip install 'gridformer[{logger}]' adds it")
    start(logger, token_folder, tmp_path, 7)
    out = start(logger, token_folder, tmp_path, STEPS + 1)
    if logger == "wandb":
        folders = [*(out / "wandb").glob("offline-run-*")]
        assert len(folders) == 2
        known = json.loads((out / "loggers.json").read_text())["wandb"]
        assert {folder.name.rpartition("-")[2] for folder in folders} == {known["id"]}
        assert known["logged"] == STEPS
        return
    lines = read_metrics(out)
    assert [line["step"] for line in lines] == [*range(STEPS + 1)]
    for name in REPRODUCED:
        wanted = [(line["step"], line[name]) for line in lines if name in line]
        assert mlflow_values(out, name) == wanted, name
