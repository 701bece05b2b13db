"""A run that can start, as gridformer.launch.plan makes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gridformer.config import RunConfig
from gridformer.parallel.auto.decisions import Decisions


@dataclass(frozen=True)
class Plan:
    """A run that can start: everything was checked, and what `auto` leaves open was decided.

    resume: the checkpoint to go on from.
    """

    run: RunConfig
    out: Path
    resume: Path | None
    resume_step: int
    decisions: Decisions

    @property
    def n_processes(self) -> int:
        return self.run.layout.n_processes

    @property
    def done(self) -> bool:
        """The checkpoint has all the steps that were asked for."""
        return self.resume_step >= self.run.train.steps
