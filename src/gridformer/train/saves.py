"""The saves of a run: starts them with `gridformer.checkpoint.saver`, and reports their results."""

from __future__ import annotations

import time

from gridformer.checkpoint import checkpoint
from gridformer.checkpoint.manifest import Manifest
from gridformer.checkpoint.saver import Saver
from gridformer.mesh import Axes
from gridformer.mesh.process_group import is_effect_of_a_peer, is_gpu_error
from gridformer.models import Model
from gridformer.train.journal import Journal
from gridformer.train.plan import Plan
from gridformer.train.step import Stepper
from gridformer.utils.signals import StopRequest


class Saves:
    """Saves the checkpoints of a run.

    Args:
        plan: The checked run.
        model: This rank's model.
        axes: The axes of the mesh.
        stop: The stop request of this process.
        journal: It is told what becomes of saves.

    Attributes:
        save_s: How many seconds the last one took; None before the first.
    """

    def __init__(
        self, plan: Plan, model: Model, axes: Axes, stop: StopRequest, journal: Journal
    ) -> None:
        self.stop, self.journal = stop, journal
        self.wait = not plan.run.train.async_save
        self.full_disk_wait_s = plan.run.train.full_disk_wait_s
        self.save_s: float | None = None
        self._lost_a_peer = self._told_of_no_space = False
        self.saver = Saver(
            plan.out,
            plan.run,
            axes,
            stop.hold,
            stop.release,
            self._is_hopeless,
            self._seconds_left,
            self._no_space,
        )
        if plan.run.train.saves_meanwhile:
            self.saver.reserve(checkpoint.updated_parameters(model))
        if axes.world.index == 0:
            self.saver.sweep()

    def save(self, manifest: Manifest, stepper: Stepper, last: bool) -> None:
        """Saves a checkpoint; see `Saver.save`. All ranks call it together, between two steps.

        Args:
            manifest: The manifest without files and index.
            stepper: Holds the model and its updates, whose shards are saved.
            last: Whether the run ends after it.

        Raises:
            SaveError: It is the last one and could not be written. All ranks raise it.
        """
        self.journal.state("saving")
        shards = checkpoint.shards_of(stepper.model, stepper.updates)
        self.saver.save(manifest, shards, wait=self.wait, last=last)
        self.tell()

    def tell(self) -> None:
        """Prints what became of saves."""
        for one in self.saver.news():
            self.save_s = one.outcome.seconds
            self.journal.saved(one)

    def finish(self) -> None:
        """Waits for a save under way, also after an error."""
        if self.saver.busy:
            self.journal.say("saving")
        self.saver.finish()
        self.tell()

    def note_error(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        """Notes how the run ends, as the exit of a context, before `finish` waits.

        After an error of the GPU itself, NCCL's own thread ends the process a moment later.
        """
        self._lost_a_peer = error is not None and is_effect_of_a_peer(error)
        if isinstance(error, Exception) and is_gpu_error(error):
            self.stop.report_now(error)

    def _is_hopeless(self) -> bool:
        """Returns whether another rank has ended, perhaps before it wrote its part of a save."""
        return self._lost_a_peer or self.stop.is_hopeless()

    def _seconds_left(self) -> float:
        """Returns within how many seconds this process must have ended."""
        ends_at = self.stop.policy.ends_at
        return min(
            self.stop.seconds_left, float("inf") if ends_at is None else ends_at - time.time()
        )

    def _no_space(self, why: str) -> None:
        """Tells, once, that the last checkpoint waits for space."""
        self.journal.state("saving")
        if not self._told_of_no_space:
            self._told_of_no_space = True
            self.journal.note(
                f"the last checkpoint finds no space ({why}): free some, as the run ends without "
                f"it after {self.full_disk_wait_s:g} s (train.full_disk_wait_s)"
            )
