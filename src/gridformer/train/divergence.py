"""What a run does about a step that is not finite: `train.on_divergence`.

The decisions depend on steps and checkpoints alone, and each checkpoint contains the decisions
before it. So they are the same on every layout, and a run that is killed and resumed makes them
again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gridformer.checkpoint import find
from gridformer.checkpoint.fallback import set_aside
from gridformer.checkpoint.manifest import Divergences
from gridformer.checkpoint.remote import give_up
from gridformer.comm.agree import first_text
from gridformer.config import TrainConfig
from gridformer.mesh import Axes
from gridformer.train.diagnosis import Diagnosis
from gridformer.utils.errors import DivergedError


@dataclass(frozen=True)
class Decision:
    """How a run goes on after a step that was not finite.

    Attributes:
        back_to: The checkpoint to go back to; None leaves the step out.
        told: A sentence about it.
    """

    back_to: Path | None
    told: str


class Recovery:
    """Decides how a run goes on, and counts what it has decided.

    Args:
        train: The training config.
        run_dir: The run directory.
        axes: The axes of the mesh.
        data_start: The step at which the order of samples began, before which it cannot go back.

    Attributes:
        done: The decisions so far.
    """

    def __init__(self, train: TrainConfig, run_dir: Path, axes: Axes, data_start: int = 0) -> None:
        self.train, self.run_dir, self.axes = train, run_dir, axes
        self.data_start = data_start
        self.done = Divergences()

    @property
    def present(self) -> TrainConfig:
        """The training config with the learning rate that rollbacks have left."""
        if self.done.lr_factor == 1.0:
            return self.train
        return self.train.model_copy(update={"lr": self.train.lr * self.done.lr_factor})

    def succeeded(self) -> None:
        """Notes that a step was finite."""
        if self.done.in_a_row:
            self.done = self.done.model_copy(update={"in_a_row": 0})

    def decide(self, error: DivergedError, found: Diagnosis) -> Decision:
        """Returns how the run goes on. All ranks call it together.

        Args:
            error: The error that the step has raised.
            found: Why it was not finite.

        Raises:
            DivergedError: The run ends.
        """
        what = str(error).split(". Lower ")[0]
        why = f"{what}; {found.cause}"
        kind, limit = self.train.on_divergence, self.train.divergences
        if kind == "stop" or (kind == "skip" and error.done):
            others = "rollback" if error.done else "skip or rollback"
            raise DivergedError(
                f"{why}. {found.advice}; train.on_divergence={others} goes on by itself"
            )
        if kind == "skip":
            in_a_row = self.done.in_a_row + 1
            if in_a_row > limit:
                raise DivergedError(
                    f"{why}. {limit} steps before it were left out (train.divergences={limit}). "
                    f"{found.advice}"
                )
            self.done = self.done.model_copy(update={"in_a_row": in_a_row})
            return Decision(None, f"{why}; left out, as train.on_divergence=skip says")
        return self._back(why, found.advice, limit)

    def _back(self, why: str, advice: str, limit: int) -> Decision:
        if self.done.rollbacks >= limit:
            raise DivergedError(
                f"{why}. The run has gone back {limit} times (train.divergences={limit}). {advice}"
            )
        steps: list[int] = []
        if self.axes.world.index == 0:  # the others might see the folder of a moment before
            steps = [int(path.name.split("-")[1]) for path in find.complete(self.run_dir)]
            steps = [step for step in steps if step >= self.data_start]
        wanted = self.train.rollback_checkpoints
        chosen = str(steps[-wanted] if wanted <= len(steps) else steps[0]) if steps else ""
        step = first_text(chosen, self.axes.world)
        if not step:
            raise DivergedError(
                f"{why}. There is no checkpoint yet to go back to: lower train.save_every. {advice}"
            )
        folder = self.run_dir / "checkpoints" / f"step-{int(step):08d}"
        later = [f"step-{number:08d}" for number in steps if number > int(step)]
        for name in later:
            set_aside(folder.with_name(name), "rolled-back")
        trouble = give_up(self.train.checkpoint_to, later)
        factor = self.done.lr_factor * self.train.rollback_lr
        self.done = Divergences(rollbacks=self.done.rollbacks + 1, lr_factor=factor)
        return Decision(
            folder,
            f"{why}; going back to step {step} with {factor:g} of the learning rate, as "
            f"train.on_divergence=rollback says{trouble}",
        )
