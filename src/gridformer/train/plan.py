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
from gridformer.parallel.registry import describe_layout
from gridformer.train.optimizer import learning_rate
from gridformer.utils.units import format_value, three_digits

# Keys by which two starts of one run differ in nothing that they compute.
_UNTOLD = {"max_hours", "trace_step", "init_from", "restart", "sources"}


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
    # How the run differs from the one that wrote `resume`, in words
    changes: tuple[str, ...] = ()

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
        changes = tuple(_changes(manifest, self.run))
        return replace(plan, older=older, damaged=damaged, changes=changes)

    @property
    def n_processes(self) -> int:
        return self.run.layout.n_processes

    @property
    def done(self) -> bool:
        """Whether the checkpoint contains all steps of the run, and the last one is evaluated."""
        steps = self.run.train.steps
        return self.resume_step > steps or (self.resume_step == steps and not self.unevaluated)


def _changes(manifest: Manifest, run: RunConfig) -> list[str]:
    """Returns what a run that resumes does in another way than the one that wrote a checkpoint."""
    before, now = RunConfig.model_validate(manifest.run), run
    layouts = [describe_layout(one.layout) for one in (before, now)]
    changes = [f"layout was {layouts[0]}, now {layouts[1]}"] if layouts[0] != layouts[1] else []
    for name in ("data", "train"):
        there = manifest.run.get(name, {})
        changes += [
            f"{name}.{key} was {format_value(there[key])}, now {format_value(value)}"
            for key, value in getattr(now, name).model_dump(mode="json").items()
            if key in there and there[key] != value and key not in _UNTOLD
        ]
    if manifest.step < now.train.steps:
        rates = [learning_rate(manifest.step, one.train) for one in (before, now)]
        if abs(rates[1] - rates[0]) > 0.01 * max(rates):
            last = learning_rate(max(0, manifest.step - 1), before.train)
            changes.append(
                f"the learning rate of step {manifest.step + 1} is {three_digits(rates[1])}, after "
                f"{three_digits(last)} in step {manifest.step}, because its schedule changed"
            )
    return changes
