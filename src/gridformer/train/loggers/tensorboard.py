"""TensorBoard events in the run directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gridformer.train.callbacks import Callback
from gridformer.train.metrics import EVENTS, grouped
from gridformer.utils.files import writing


class TensorBoard(Callback):
    """Writes the metrics of each step as events of TensorBoard.

    Args:
        run_dir: The run directory.
        resume_step: The step of the checkpoint to resume from; TensorBoard hides what earlier
            processes wrote about later steps.
    """

    def __init__(self, run_dir: Path, resume_step: int) -> None:
        self.folder = run_dir / EVENTS
        self._open(resume_step)

    def _open(self, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._events = SummaryWriter(str(self.folder), purge_step=resume_step + 1)

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        """Writes the numbers of a step."""
        with writing(self.folder):
            for name, value in metrics.items():
                if name != "step" and not isinstance(value, str):
                    self._events.add_scalar(grouped(name), value, metrics["step"])

    def on_diverged(self, step: int, why: str, back_to: int | None) -> None:
        """Hides the steps that run again."""
        if back_to is not None:
            self.close()
            self._open(back_to)

    def close(self) -> None:
        with writing(self.folder):
            self._events.close()
