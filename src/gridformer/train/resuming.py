"""The checkpoint that a run goes on from, if the newest one may be damaged, and its copy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from gridformer.checkpoint.copies import copy_newest, replace_damaged
from gridformer.checkpoint.fallback import Damaged, choose_together, set_aside
from gridformer.checkpoint.going_on import CopyPatience, going_on, until
from gridformer.checkpoint.manifest import Manifest
from gridformer.checkpoint.place import LocalPlace
from gridformer.checkpoint.same_run import check_copy, check_same_run, data_start_of
from gridformer.comm.agree import first_text
from gridformer.mesh import Axes
from gridformer.train.plan import Plan


def intact(plan: Plan, axes: Axes) -> tuple[Plan, Manifest | None]:
    """Replaces a damaged checkpoint by the newest undamaged one, if `train.fallback` is true.

    All ranks call it together. A checkpoint that should be at `train.checkpoint_to` is copied.

    Returns:
        The plan with the checkpoint, and its manifest if its checksums are verified by now.
    """
    verified = None
    if plan.run.train.fallback and plan.resume is not None:
        found = choose_together([plan.resume, *plan.older], axes, partial(_replace, plan, axes))
        verified = found.manifest
        if found.folder != plan.resume:
            check_same_run(verified, plan.run, found.folder, plan.data)
        plan = replace(
            plan,
            resume=found.folder,
            resume_step=verified.step,
            data_start=data_start_of(verified, plan.run, plan.data),
            damaged=(*plan.damaged, *found.damaged),
        )
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

    Args:
        plan: The run.
        axes: The axes of the mesh.
        work: The work of the first rank.

    Returns:
        The result of `work`, on all ranks; an empty text if the first rank cannot write to the run
        directory that it is at work.
    """
    world, patience_s = axes.world, plan.run.train.timeout_s
    draft = LocalPlace(plan.out).draft("copy")
    found = ""
    if world.index:
        first_text("", world)  # the first rank has begun
        patience = CopyPatience(draft, patience_s, patience_s)
        until(lambda: not draft.exists() or patience.is_over())
    else:
        with ExitStack() as marked:
            try:
                marked.enter_context(going_on(draft, patience_s))
                works = True
            except OSError as error:
                works = False
                _say(f"copies cannot be made or used now: {error}")
            first_text("", world)
            found = work() if works else ""
    return first_text(found, world)


def _say(sentence: str) -> None:
    print(f"gridformer: {sentence}", file=sys.stderr, flush=True)
