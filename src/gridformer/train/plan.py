"""The plan of a run, which `gridformer.launch.plan` makes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from gridformer.checkpoint.checkpoint import data_start_of
from gridformer.checkpoint.copies import Damaged
from gridformer.checkpoint.manifest import Manifest
from gridformer.checkpoint.weights import InitialWeights
from gridformer.config import RunConfig
from gridformer.data.run_data import Fingerprint
from gridformer.parallel.auto.decisions import Decisions


@dataclass(frozen=True)
class Plan:
    """A run that can start: its config is checked and every `auto` is decided."""

    run: RunConfig
    out: Path
    resume: Path | None  # the checkpoint to resume from, or None
    resume_step: int  # the step of that checkpoint, or 0
    decisions: Decisions  # the choice for each `auto`
    # The weights with which a new run begins; None if they are random, and for a run that resumes
    start: InitialWeights | None = None
    data_start: int = 0  # the step at which the order of samples began, see `data.restart`
    # The fingerprint of the data; None leaves it out of checkpoints
    data: Fingerprint | None = None
    # Checkpoints to try if `resume` is damaged, newest first; see `train.fallback`
    older: tuple[Path, ...] = ()
    damaged: tuple[Damaged, ...] = ()  # checkpoints after `resume` that were found damaged
    # Whether the run was stopped after its last step, before the evaluation there
    unevaluated: bool = False

    def resuming(
        self,
        folder: Path,
        manifest: Manifest,
        older: tuple[Path, ...] = (),
        damaged: tuple[Damaged, ...] = (),
    ) -> Self:
        """Returns the plan of the same run that goes on from a checkpoint."""
        start = data_start_of(manifest, self.run, self.data)
        plan = replace(self, resume=folder, resume_step=manifest.step, start=None, data_start=start)
        return replace(plan, older=older, damaged=damaged)

    @property
    def n_processes(self) -> int:
        return self.run.layout.n_processes

    @property
    def done(self) -> bool:
        """Whether the checkpoint contains all steps of the run, and the last one is evaluated."""
        steps = self.run.train.steps
        return self.resume_step > steps or (self.resume_step == steps and not self.unevaluated)
