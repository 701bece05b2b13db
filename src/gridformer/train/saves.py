"""The checkpoints of a run: where it resumes, and its own saves."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from gridformer.checkpoint import checkpoint
from gridformer.checkpoint.checkpoint import check_copy, check_same_run
from gridformer.checkpoint.copies import (
    Damaged,
    choose_together,
    copy_newest,
    replace_damaged,
    set_aside,
)
from gridformer.checkpoint.manifest import Manifest
from gridformer.checkpoint.save import polling, renewing
from gridformer.checkpoint.saver import Saver
from gridformer.checkpoint.store import LocalStore
from gridformer.comm.agree import first_text
from gridformer.mesh import Axes
from gridformer.mesh.process_group import is_effect_of_a_peer, is_gpu_error
from gridformer.train.journal import Journal
from gridformer.train.plan import Plan
from gridformer.train.step import Stepper
from gridformer.utils.signals import StopRequest


def intact_checkpoint(plan: Plan, axes: Axes) -> tuple[Plan, Manifest | None]:
    """Replaces a damaged checkpoint by the newest undamaged one, if `train.fallback` is true.

    All ranks call it together. A checkpoint that should be at `train.checkpoint_to` is copied.

    Returns:
        The plan with the checkpoint, and its manifest if its checksums are verified by now.
    """
    verified = None
    if plan.run.train.fallback and plan.resume is not None:
        chosen = choose_together([plan.resume, *plan.older], axes, partial(_replace, plan, axes))
        verified = chosen.manifest
        if chosen.folder != plan.resume:
            check_same_run(verified, plan.run, chosen.folder, plan.data)
        all_damaged = (*plan.damaged, *chosen.damaged)
        plan = plan.resuming(chosen.folder, verified, plan.older, all_damaged)
    if axes.world.index == 0:
        for damaged in plan.damaged:
            kept = set_aside(damaged.folder, "damaged")
            _say(
                f"{damaged.reason}; resuming from {plan.resume}, as train.fallback=true says, and "
                f"keeping the damaged one as {kept}"
            )
    if plan.resume is not None and plan.run.train.checkpoint_to:
        _first_works(plan, axes, partial(_copy, plan))
    return plan, verified


def _replace(
    plan: Plan, axes: Axes, damaged: Sequence[Damaged], before: Path | None
) -> Path | None:
    """Replaces damaged checkpoints by a copy; see `replace_damaged`. All ranks call it together."""
    url = plan.run.train.checkpoint_to
    if not url:
        return None

    def work() -> str:
        check = partial(check_copy, plan.run, plan.data)
        copy = replace_damaged(url, plan.out, check, damaged, before)
        return copy.name if copy else ""

    name = _first_works(plan, axes, work)
    return plan.out / "checkpoints" / name if name else None


def _copy(plan: Plan) -> str:
    """Copies the newest checkpoint if the copy is missing, or says why it cannot."""
    if why := copy_newest(plan.run.train, plan.out):
        url = plan.run.train.checkpoint_to
        _say(f"the newest checkpoint is not at {url} ({why}): the next save copies again")
    return ""


def _first_works(plan: Plan, axes: Axes, work: Callable[[], str]) -> str:
    """Lets the first rank do work that may take longer than the timeout of a message.

    All ranks call it together.

    Returns:
        The result of `work`, on all ranks; an empty text if the first rank cannot write to the run
        directory that it is at work.
    """
    world, timeout_s = axes.world, plan.run.train.timeout_s
    draft = LocalStore(plan.out).draft("copy")
    result = ""
    if world.index:
        first_text("", world)  # the first rank has begun
        for _ in polling(timeout_s, draft):
            if draft.renewed_ns() is None:
                break
    else:
        with ExitStack() as shown:
            shown.callback(draft.close)
            try:
                shown.enter_context(renewing(draft, timeout_s))
                works = True
            except OSError as error:
                works = False
                _say(f"copies cannot be made or used now: {error}")
            first_text("", world)
            result = work() if works else ""
    return first_text(result, world)


def _say(sentence: str) -> None:
    print(f"gridformer: {sentence}", file=sys.stderr, flush=True)


class Saves:
    """Saves the checkpoints of a run, and tells its journal what becomes of them.

    Attributes:
        save_s: How many seconds the last one took; None before the first.
    """

    def __init__(
        self, plan: Plan, stepper: Stepper, axes: Axes, stop: StopRequest, journal: Journal
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
            self.saver.reserve(checkpoint.shards_of(stepper.model, stepper.updates))
        if axes.world.index == 0:
            self.saver.store.sweep()

    def save(self, manifest: Manifest, stepper: Stepper, last: bool) -> None:
        """Saves a checkpoint; see `Saver.save`. All ranks call it together, between two steps.

        Raises:
            SaveError: It is the last one and could not be written. All ranks raise it.
        """
        self.journal.state("saving")
        shards = checkpoint.shards_of(stepper.model, stepper.updates)
        self.saver.save(manifest, shards, wait=self.wait, last=last)
        self.tell()

    def tell(self) -> None:
        """Tells what became of saves."""
        for outcome in self.saver.news():
            self.save_s = outcome.seconds
            self.journal.saved(outcome)

    def finish(self) -> None:
        """Waits for a save under way, also after an error."""
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
