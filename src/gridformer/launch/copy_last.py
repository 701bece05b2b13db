"""The copy of a run's last checkpoint, after which no save tries again."""

from __future__ import annotations

import time

from gridformer.checkpoint.copies import copy_newest
from gridformer.launch.worker_process import print_last
from gridformer.mesh.launch_env import launched_place
from gridformer.train.plan import Plan

_FIRST_S, _LONGEST_S = 5.0, 60.0  # between two attempts


def copy_last(plan: Plan, ends_at: float | None = None) -> None:
    """Copies the last checkpoint of a run that is done to `train.checkpoint_to`, if need be.

    The processes of the run have ended, so none of them waits meanwhile. This process, or under
    torchrun and srun that of rank 0, tries again for `train.full_disk_wait_s`.

    Args:
        plan: The run, which has done all its steps.
        ends_at: When this process must have ended (`time.time`); None means never.

    Raises:
        SystemExit: The last checkpoint is not there, with code 1.
    """
    train, place = plan.run.train, launched_place()
    if not train.checkpoint_to or (place and place.rank):
        return
    wait_s, pause = train.full_disk_wait_s, _FIRST_S
    if ends_at is not None:
        wait_s = min(wait_s, ends_at - time.time())
    until = time.monotonic() + wait_s
    while why := copy_newest(train, plan.out):
        if time.monotonic() + pause > until:
            print_last(
                f"gridformer: all steps are done and their checkpoint is in {plan.out}, but it is "
                f"not at {train.checkpoint_to} ({why}): run the same command to copy it"
            )
            raise SystemExit(1)
        if pause == _FIRST_S:
            print_last(
                f"gridformer: the last checkpoint is not at {train.checkpoint_to} yet ({why}); "
                f"trying again for {wait_s:.0f} s (train.full_disk_wait_s)"
            )
        time.sleep(pause)
        pause = min(_LONGEST_S, 2 * pause)
