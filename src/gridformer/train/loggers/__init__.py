"""Loggers of other tools: TensorBoard, Weights & Biases and MLflow, as `train.loggers` names them.

Their packages are imported when a run starts, on the first rank.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gridformer.train.callbacks import Callback

if TYPE_CHECKING:
    from gridformer.config import RunConfig

# The package of each, where it is not one that gridformer always needs.
PACKAGES = {"wandb": "wandb", "mlflow": "mlflow"}


def missing_packages(loggers: Sequence[str]) -> list[str]:
    """Returns a sentence for each logger whose package is not installed."""
    return [
        f"train.loggers={name} needs {package}: pip install 'gridformer[{name}]', or leave it out "
        "of train.loggers"
        for name in loggers
        if (package := PACKAGES.get(name)) and importlib.util.find_spec(package) is None
    ]


def open_loggers(
    run: RunConfig, run_dir: Path, resume_step: int
) -> tuple[list[Callback], list[Callback]]:
    """Opens the loggers that `train.loggers` names.

    Args:
        run: The run.
        run_dir: The run directory.
        resume_step: The step of the checkpoint to resume from; 0 for a new run.

    Returns:
        The loggers whose errors end a run, because they write to the run directory only, and the
        others.
    """
    own: list[Callback] = []
    others: list[Callback] = []
    for name in run.train.loggers:
        if name == "tensorboard":
            from gridformer.train.loggers.tensorboard import TensorBoard

            own.append(TensorBoard(run_dir, resume_step))
        elif name == "wandb":
            from gridformer.train.loggers.wandb import WeightsAndBiases

            others.append(WeightsAndBiases(run_dir, resume_step))
        else:
            from gridformer.train.loggers.mlflow import MLflow

            others.append(MLflow(run_dir, resume_step))
    return own, others
