"""Weights & Biases, as `train.loggers=wandb`. Without a login a run is kept offline."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gridformer.train.loggers.joined import JoinedLogger
from gridformer.train.metrics import grouped

_PROJECT = "gridformer"
_EXIT = {"done": 0, "stopped": 0, "failed": 1, "diverged": 1}


class WeightsAndBiases(JoinedLogger):
    """Logs to Weights & Biases, or to a folder `wandb` in the run directory.

    The package's own environment variables apply: WANDB_MODE (online, offline or disabled),
    WANDB_PROJECT, WANDB_ENTITY, WANDB_RUN_GROUP and so on.

    Args:
        run_dir: The run directory.
        resume_step: The step of the checkpoint to resume from; 0 for a new run.
    """

    key = "wandb"

    def __init__(self, run_dir: Path, resume_step: int) -> None:
        super().__init__(run_dir, resume_step)
        self._run: Any = None

    def begin(self, run_id: str | None, title: str) -> tuple[str, int | None]:
        # A trainer should not send the package's usage reports to its makers.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        assert self.settings is not None, "on_start comes first"
        mode = os.environ.get("WANDB_MODE") or ("online" if _has_login(wandb) else "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
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
            self._run.finish(exit_code=_EXIT[how])
            self._run = None

    def close(self) -> None:
        self.finish("failed")


def _has_login(wandb: Any) -> bool:
    """Returns whether there is a key to log in with, without asking for one."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return bool(wandb.login(prompt=False, verify=False))
    except TypeError:  # older versions
        return bool(wandb.api.api_key)
    except Exception:  # the package's own errors, which differ between its versions
        return False
