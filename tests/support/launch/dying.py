"""Workers of real runs that die in a step, for tests of restarts."""

import os
import signal
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from gridformer.checkpoint.manifest import MANIFEST
from gridformer.checkpoint.store import Draft, name_of
from gridformer.launch.run import worker
from gridformer.train.plan import Plan
from gridformer.train.trainer import Trainer
from tests.support.multirank.runs import STEPS

DIES_AT = 4  # steps are done before


def dies_once(plan: Plan) -> None:
    """Train; the last rank is killed in the first attempt."""
    marker = plan.out / "died"

    def dies(step: int) -> None:
        if step == DIES_AT and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    _train(plan, dies)


def dies_in_a_save(plan: Plan) -> None:
    """Train; the last rank is killed while it saves the last checkpoint, in the first attempt."""
    marker, whole = plan.out / "died", Draft.writing

    def dies(self: Draft, name: str) -> Any:
        last = dist.get_rank() == dist.get_world_size() - 1
        if last and name != MANIFEST and self.target.name == name_of(STEPS) and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(self, name)

    with patch.object(Draft, "writing", dies):
        worker(plan)


def fails_at_once(plan: Plan) -> None:
    """Train; the last rank fails in the same step of each attempt."""

    def fails(step: int) -> None:
        if step == DIES_AT:
            raise ValueError(f"the root cause, met by process {os.getpid()}")

    _train(plan, fails)


def _train(plan: Plan, before: Any) -> None:
    whole = Trainer._start

    def start_of(self: Trainer, step: int) -> None:
        if not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1:
            before(step)
        whole(self, step)

    with patch.object(Trainer, "_start", start_of):
        worker(plan)
