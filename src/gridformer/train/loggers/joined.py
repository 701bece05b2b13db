"""The base class of loggers of services: it keeps the id under which a resumed run goes on there.

`loggers.json` in the run directory keeps it. A run that is resumed joins its run at the service,
and a run that begins anew begins a new one there. So does a run that goes back to a checkpoint
after a step that was not finite, because steps that were logged cannot be taken back.

A process that is killed takes with it what its logger has not sent yet. metrics.jsonl has these
steps, so the process that resumes the run logs them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gridformer.config import RunConfig
from gridformer.train.callbacks import Callback, RunEnd, RunStart
from gridformer.train.metrics import read_metrics
from gridformer.utils.errors import UserError
from gridformer.utils.files import read_json

IDS = "loggers.json"


class JoinedLogger(Callback):
    """Logs to a service whose runs have ids. A subclass says how.

    Args:
        run_dir: The run directory.
        resume_step: The step of the checkpoint to resume from; 0 for a new run.

    Attributes:
        key: The name of the service in loggers.json.
        logged: The last step that is logged there; -1 if there is none.
    """

    key = ""

    def __init__(self, run_dir: Path, resume_step: int) -> None:
        self.run_dir, self.resume_step, self.logged = run_dir, resume_step, -1
        self.settings: RunConfig | None = None
        self.about: dict[str, Any] = {}
        self._part, self._after = 0, -1  # a rollback begins a part, with the steps after this one
        self._id = ""

    @property
    def name(self) -> str:
        return self.key

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
        """Ends the run there. It can be joined again.

        Args:
            how: See `RunEnd`; `diverged` if the run goes on in another one.
        """
        raise NotImplementedError

    def on_start(self, start: RunStart) -> None:
        self.settings = start.run
        self.about = {
            "layout": start.layout,
            "devices": start.devices,
            "device": start.device,
        }
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
        if step > self.logged or (alone and step == self.logged):
            self.log(step, {name: v for name, v in metrics.items() if _is_number(name, v)})
            self.logged = step

    def on_diverged(self, step: int, why: str, back_to: int | None) -> None:
        """Goes on in a run of its own after a rollback, whose steps have other values."""
        if back_to is None:
            return
        self.finish("diverged")
        self._part, self._after = self._part + 1, back_to
        self._begin(None)

    def on_end(self, end: RunEnd) -> None:
        self.finish(end.how)
        self._remember(self.logged)

    def _known(self) -> dict[str, Any]:
        try:
            found = read_json(self.run_dir / IDS)[self.key]
            return found if isinstance(found["id"], str) else {}
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
            found = dict(read_json(path))
        except (UserError, ValueError, TypeError):
            found = {}
        unfinished = path.with_name(f".{IDS}.unfinished")
        unfinished.write_text(json.dumps({**found, self.key: about}) + "\n", encoding="utf-8")
        os.replace(unfinished, path)


def _is_number(name: str, value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return name != "step" and number and math.isfinite(value)  # type: ignore[arg-type]
