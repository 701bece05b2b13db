"""The plan of a run, which `gridformer.launch.plan` makes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gridformer.checkpoint.fallback import Damaged
from gridformer.checkpoint.weights import InitialWeights
from gridformer.config import RunConfig
from gridformer.data.run_data import Fingerprint
from gridformer.parallel.auto.decisions import Decisions


@dataclass(frozen=True)
class Plan:
    """A run that can start: its config is checked and every `auto` is decided.

    Attributes:
        run: The checked config.
        out: The run directory.
        resume: The checkpoint to resume from, or None.
        resume_step: The step of that checkpoint, or 0.
        decisions: The choice for each `auto`.
        start: The weights with which a new run begins; None if they are random, and for a run that
            resumes.
        data_start: The step at which the order of samples began, see `data.restart`.
        data: The fingerprint of the data; None leaves it out of checkpoints.
        older: Checkpoints to try if `resume` is damaged, newest first; see `train.fallback`.
        damaged: Checkpoints after `resume` that were found damaged.
        unevaluated: Whether the run was stopped after its last step, before the evaluation there.
    """

    run: RunConfig
    out: Path
    resume: Path | None
    resume_step: int
    decisions: Decisions
    start: InitialWeights | None = None
    data_start: int = 0
    data: Fingerprint | None = None
    older: tuple[Path, ...] = ()
    damaged: tuple[Damaged, ...] = ()
    unevaluated: bool = False

    @property
    def n_processes(self) -> int:
        return self.run.layout.n_processes

    @property
    def done(self) -> bool:
        """Whether the checkpoint contains all steps of the run, and the last one is evaluated."""
        steps = self.run.train.steps
        return self.resume_step > steps or (self.resume_step == steps and not self.unevaluated)
