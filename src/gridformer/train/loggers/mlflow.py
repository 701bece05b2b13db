"""MLflow, as `train.loggers=mlflow`: a tracking server, or a file beside the run directories."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gridformer.train.callbacks import Saved
from gridformer.train.loggers.joined import JoinedLogger

_EXPERIMENT = "gridformer"
_FILE, _ARTIFACTS = "mlflow.db", "mlruns"  # beside the run directories
_STATUS = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED", "diverged": "FAILED"}
_EVERY_S = 5.0  # between two messages to the server
_MOST = 1000  # metrics that a message may have
_LONGEST = 500  # characters of a parameter


class MLflow(JoinedLogger):
    """Logs to an MLflow server, or to the file `mlflow.db` beside the run directory.

    The package's own environment variables apply: MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME.

    Args:
        run_dir: The run directory.
        resume_step: The step of the checkpoint to resume from; 0 for a new run.
    """

    key = "mlflow"

    def __init__(self, run_dir: Path, resume_step: int) -> None:
        super().__init__(run_dir, resume_step)
        self._client: Any = None
        self._waiting: list[tuple[str, float, int, int]] = []
        self._sent = 0.0

    def begin(self, run_id: str | None, title: str) -> tuple[str, int | None]:
        # A trainer should not send the package's usage reports to its makers.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.tracking import MlflowClient

        assert self.settings is not None, "on_start comes first"
        beside = self.run_dir.resolve().parent
        server = os.environ.get("MLFLOW_TRACKING_URI")
        uri = server or f"sqlite:///{beside / _FILE}"
        self._client = MlflowClient(tracking_uri=uri)
        if run_id is not None:
            self._id = run_id
            self._client.update_run(run_id, status="RUNNING")
            self._tag()
            return run_id, self._last_step()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _EXPERIMENT)
        found = self._client.get_experiment_by_name(name)
        if found:
            experiment = found.experiment_id
        else:
            place = None if server else (beside / _ARTIFACTS).as_uri()
            experiment = self._client.create_experiment(name, artifact_location=place)
        self._id = self._client.create_run(experiment, run_name=title).info.run_id
        self._tag()
        from mlflow.entities import Param

        settings = _flat(self.settings.model_dump(mode="json"))
        params = [Param(key, str(value)[:_LONGEST]) for key, value in settings.items()]
        for at in range(0, len(params), 100):  # the most that a message may have
            self._client.log_batch(self._id, params=params[at : at + 100])
        return self._id, -1

    def _tag(self) -> None:
        """Records where the run runs now, which may differ after each resume."""
        for name, value in self.about.items():
            self._client.set_tag(self._id, f"gridformer.{name}", str(value))

    def _last_step(self) -> int:
        history = self._client.get_metric_history(self._id, "tokens")
        return max((metric.step for metric in history), default=-1)

    def log(self, step: int, values: dict[str, float]) -> None:
        now = int(1000 * time.time())
        self._waiting += [(name, float(value), now, step) for name, value in values.items()]
        if time.monotonic() - self._sent > _EVERY_S or len(self._waiting) > _MOST // 2:
            self._send()

    def on_evaluation(self, step: int, results: Mapping[str, Any]) -> None:
        self._send()

    def on_saved(self, saved: Saved) -> None:
        """Sends all steps of a checkpoint, so that none is missing after resuming from it."""
        self._send()

    def finish(self, how: str) -> None:
        if self._client is not None:
            self._send()
            self._client.set_terminated(self._id, status=_STATUS[how])
            self._client = None

    def close(self) -> None:
        self.finish("failed")

    def _send(self) -> None:
        if not self._waiting:
            return
        from mlflow.entities import Metric

        sent, self._waiting = self._waiting, []
        for at in range(0, len(sent), _MOST):
            self._client.log_batch(
                self._id, metrics=[Metric(*one) for one in sent[at : at + _MOST]]
            )
        self._sent = time.monotonic()


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
