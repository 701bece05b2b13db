"""Loggers of other tools: TensorBoard, Weights & Biases and MLflow, as `train.loggers` names them.

Their packages are imported when a run starts, on the first rank.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridformer.train.callbacks import Callback, RunEnd, RunStart
from gridformer.train.metrics import TENSORBOARD, flat, grouped, is_number, read_metrics
from gridformer.utils.errors import UserError
from gridformer.utils.files import read_json, writing

if TYPE_CHECKING:
    from gridformer.config import RunConfig

IDS = "loggers.json"
_NAME = "gridformer"  # of projects and experiments
_MLFLOW_FILE, _MLFLOW_ARTIFACTS = "mlflow.db", "mlruns"  # beside the run directories
_MLFLOW_STATUS = {
    "done": "FINISHED",
    "stopped": "KILLED",
    "failed": "FAILED",
    "diverged": "FAILED",
}
_EVERY_S = 5.0  # between two messages to MLflow's server
_METRICS, _PARAMETERS = 1000, 100  # that a message may have
_LONGEST = 500  # characters of a parameter


def missing_packages(loggers: Sequence[str]) -> list[str]:
    """Returns a sentence for each logger whose package is not installed."""
    return [
        f"train.loggers={name} needs {name}: pip install 'gridformer[{name}]', or leave it out "
        "of train.loggers"
        for name in loggers
        if name in ("wandb", "mlflow") and importlib.util.find_spec(name) is None
    ]


def open_loggers(
    run: RunConfig, run_dir: Path, resume_step: int
) -> tuple[list[Callback], list[Callback]]:
    """Opens the loggers that `train.loggers` names.

    Returns:
        The loggers whose errors end a run, because they write to the run directory only, and the
        others.
    """
    kinds = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}
    loggers = [kinds[name](run_dir, resume_step) for name in run.train.loggers]
    own = [logger for logger in loggers if isinstance(logger, TensorBoard)]
    return [*own], [logger for logger in loggers if logger not in own]


class TensorBoard(Callback):
    """Writes the metrics of each step as events of TensorBoard.

    TensorBoard hides what earlier processes wrote about steps after `resume_step`.
    """

    def __init__(self, run_dir: Path, resume_step: int) -> None:
        self.folder = run_dir / TENSORBOARD
        self._open(resume_step)

    def _open(self, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._events = SummaryWriter(str(self.folder), purge_step=resume_step + 1)

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        with writing(self.folder):
            for name, value in metrics.items():
                if name != "step" and not isinstance(value, str | list):
                    self._events.add_scalar(grouped(name), value, metrics["step"])

    def on_diverged(self, step: int, why: str, back_to: int | None) -> None:
        if back_to is not None:  # hides the steps that run again
            self.close()
            self._open(back_to)

    def close(self) -> None:
        with writing(self.folder):
            self._events.close()


class ServiceLogger(Callback):
    """Logs to a service whose runs have ids. A subclass says how.

    `loggers.json` in the run directory keeps the id. A run that is resumed joins its run at the
    service, and a run that begins anew begins a new one there. So does a run that goes back to a
    checkpoint after a step that was not finite, because logged steps cannot be taken back.

    A process that is killed takes with it what its logger has not sent yet. metrics.jsonl has these
    steps, so the process that resumes the run logs them.

    Attributes:
        name: The name of the service in loggers.json and in messages.
        logged: The last step that is logged there; -1 if there is none.
    """

    name = ""

    def __init__(self, run_dir: Path, resume_step: int) -> None:
        self.run_dir, self.resume_step, self.logged = run_dir, resume_step, -1
        self.settings: RunConfig | None = None
        self.about: dict[str, Any] = {}
        self._part, self._after = 0, -1  # a rollback begins a part, with the steps after this one
        self._id = ""

    def begin(self, run_id: str | None, title: str) -> tuple[str, int | None]:
        """Begins a run, or joins one.

        Args:
            run_id: The id to join; None begins a run.
            title: Its name.

        Returns:
            Its id, and the last step that is logged there, -1 if there is none; None if that is
            not known.
        """
        raise NotImplementedError

    def log(self, step: int, values: dict[str, float]) -> None:
        """Logs the numbers of a step."""
        raise NotImplementedError

    def finish(self, how: str) -> None:
        """Ends the run there, which can be joined again.

        Args:
            how: See `RunEnd`; `diverged` if the run goes on in another one.
        """
        raise NotImplementedError

    def on_start(self, start: RunStart) -> None:
        self.settings = start.run
        self.about = {"layout": start.layout, "devices": start.devices, "device": start.device}
        known = self._known() if self.resume_step else {}
        self._part, self._after = int(known.get("part", 0)), int(known.get("after", -1))
        self._begin(known.get("id"), int(known.get("logged", -1)))
        for line in read_metrics(self.run_dir) if self.resume_step else []:
            if line["step"] <= self.resume_step:
                self.on_step(line)

    def _begin(self, run_id: str | None, logged: int = -1) -> None:
        assert self.settings is not None, "on_start comes first"
        title = self.settings.name + (f", part {self._part + 1}" if self._part else "")
        self._id, there = self.begin(run_id, title)
        self.logged = max(logged if there is None else there, self._after)
        self._remember(logged)

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        """Logs a step, unless it was logged before the run was killed and resumed."""
        step, alone = metrics["step"], "loss" not in metrics
        # The last evaluation may come after the run was stopped and resumed.
        if step > self.logged or (alone and 0 < step == self.logged):
            numbers = {name: v for name, v in metrics.items() if name != "step" and is_number(v)}
            self.log(step, numbers)
            self.logged = step

    def on_diverged(self, step: int, why: str, back_to: int | None) -> None:
        """Goes on in a run of its own after a rollback, whose steps have other values."""
        if back_to is not None:
            self.finish("diverged")
            self._part, self._after = self._part + 1, back_to
            self._begin(None)

    def on_end(self, end: RunEnd) -> None:
        self.finish(end.how)
        self._remember(self.logged)

    def close(self) -> None:
        self.finish("failed")

    def _known(self) -> dict[str, Any]:
        try:
            about = read_json(self.run_dir / IDS)[self.name]
            return about if isinstance(about["id"], str) else {}
        except (UserError, KeyError, TypeError):
            return {}

    def _remember(self, logged: int) -> None:
        """Writes to loggers.json how to join the run.

        Args:
            logged: The last step that is logged for good; later ones may not have been sent yet.
        """
        about = {"id": self._id, "part": self._part, "after": self._after, "logged": logged}
        path = self.run_dir / IDS
        try:
            known = dict(read_json(path))
        except (UserError, ValueError, TypeError):
            known = {}
        unfinished = path.with_name(f".{IDS}.unfinished")
        unfinished.write_text(json.dumps({**known, self.name: about}) + "\n", encoding="utf-8")
        os.replace(unfinished, path)


class WeightsAndBiases(ServiceLogger):
    """Logs to Weights & Biases, or without a login to a folder `wandb` in the run directory.

    The package's own environment variables apply: WANDB_MODE (online, offline or disabled),
    WANDB_PROJECT, WANDB_ENTITY, WANDB_RUN_GROUP and so on.
    """

    name = "wandb"
    _run: Any = None

    def begin(self, run_id: str | None, title: str) -> tuple[str, int | None]:
        # A trainer should not send the package's usage reports to its makers.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        assert self.settings is not None, "on_start comes first"
        mode = os.environ.get("WANDB_MODE") or ("online" if _has_login(wandb) else "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _NAME),
            group=os.environ.get("WANDB_RUN_GROUP", self.settings.name),
            name=title,
            id=run_id,
            resume="allow",
            dir=str(self.run_dir),
            mode=mode,
            settings=wandb.Settings(console="off", silent=True),
        )
        config = {**self.settings.model_dump(mode="json"), **self.about}
        self._run.config.update(config, allow_val_change=True)
        if run_id is None:
            return self._run.id, -1
        # The server says which step comes next; a run that is kept offline cannot ask it.
        return run_id, self._run.step - 1 if mode == "online" else None

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log({grouped(name): value for name, value in values.items()}, step=step)

    def finish(self, how: str) -> None:
        if self._run is not None:
            self._run.summary["state"] = how
            self._run.finish(exit_code=int(how in ("failed", "diverged")))
            self._run = None


def _has_login(wandb: Any) -> bool:
    """Returns whether there is a key to log in with, without asking for one."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return bool(wandb.login(prompt=False, verify=False))
    except Exception:  # the package's own errors, which differ between its versions
        return False


class MLflow(ServiceLogger):
    """Logs to an MLflow server, or to the file `mlflow.db` beside the run directory.

    The package's own environment variables apply: MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME.
    """

    name = "mlflow"

    def __init__(self, run_dir: Path, resume_step: int) -> None:
        super().__init__(run_dir, resume_step)
        self._client: Any = None
        self._waiting: list[tuple[str, float, int, int]] = []
        self._sent = 0.0

    def begin(self, run_id: str | None, title: str) -> tuple[str, int | None]:
        # A trainer should not send the package's usage reports to its makers.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        assert self.settings is not None, "on_start comes first"
        beside, last = self.run_dir.resolve().parent, -1
        server = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(tracking_uri=server or f"sqlite:///{beside / _MLFLOW_FILE}")
        if run_id is not None:
            self._id = run_id
            self._client.update_run(run_id, status="RUNNING")
            history = self._client.get_metric_history(run_id, "tokens")
            last = max((metric.step for metric in history), default=-1)
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _NAME)
            if known := self._client.get_experiment_by_name(name):
                experiment = known.experiment_id
            else:
                place = None if server else (beside / _MLFLOW_ARTIFACTS).as_uri()
                experiment = self._client.create_experiment(name, artifact_location=place)
            self._id = self._client.create_run(experiment, run_name=title).info.run_id
            settings = flat(self.settings.model_dump(mode="json"))
            params = [Param(key, str(value)[:_LONGEST]) for key, value in settings.items()]
            for at in range(0, len(params), _PARAMETERS):
                self._client.log_batch(self._id, params=params[at : at + _PARAMETERS])
        for name, value in self.about.items():  # where it runs now may differ after a resume
            self._client.set_tag(self._id, f"gridformer.{name}", str(value))
        return self._id, last

    def log(self, step: int, values: dict[str, float]) -> None:
        now = int(1000 * time.time())
        self._waiting += [(name, float(value), now, step) for name, value in values.items()]
        if time.monotonic() - self._sent > _EVERY_S or len(self._waiting) > _METRICS // 2:
            self._send()

    def finish(self, how: str) -> None:
        if self._client is not None:
            self._send()
            self._client.set_terminated(self._id, status=_MLFLOW_STATUS[how])
            self._client = None

    def _send(self) -> None:
        if not self._waiting:
            return
        from mlflow.entities import Metric

        sent, self._waiting = [Metric(*values) for values in self._waiting], []
        for at in range(0, len(sent), _METRICS):
            self._client.log_batch(self._id, metrics=sent[at : at + _METRICS])
        self._sent = time.monotonic()
