"""The checkpoint that a run goes on from, if the newest one may be damaged."""

from __future__ import annotations

import sys
from dataclasses import replace

from gridformer.checkpoint.fallback import choose_together, set_aside
from gridformer.checkpoint.manifest import Manifest
from gridformer.checkpoint.same_run import check_same_run, data_start_of
from gridformer.mesh import Axes
from gridformer.train.plan import Plan


def intact(plan: Plan, axes: Axes) -> tuple[Plan, Manifest | None]:
    """Replaces a damaged checkpoint by the newest one that is not, if `train.fallback` says so.

    All ranks call it together.

    Returns:
        The plan with the checkpoint, and its manifest if its checksums are verified by now.
    """
    verified = None
    if plan.run.train.fallback and plan.resume is not None:
        found = choose_together([plan.resume, *plan.older], axes)
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
            print(
                f"gridformer: {damaged.reason}; resuming from {plan.resume}, as "
                f"train.fallback=true says, and keeping the damaged one as {kept}",
                file=sys.stderr,
                flush=True,
            )
    return plan, verified
