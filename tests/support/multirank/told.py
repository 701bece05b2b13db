"""Runs of which one rank is told to stop inside a step."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

from gridformer.train import stop_protocol
from gridformer.train.plan import Plan
from gridformer.train.stop_protocol import StopProtocol
from gridformer.train.trainer import Trainer
from gridformer.utils import signals
from tests.support.multirank.runs import train

MICRO = 6  # micro-batches of a step


def told(plan: Plan, store: Path, step: int, point: int) -> tuple[int, int, str]:
    """Send SIGTERM to a rank inside a step; return micro-batches left out, exit code and cause.

    It is a rank that needs no message of a rank which waits at the same point.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    chosen = 0 if plan.run.layout.pp > 1 else size - 1
    policy = signals.StopPolicy(grace_s=600.0, requeue=("SIGTERM",))
    signals.install().uninstall()  # that of an earlier run in this process
    stop = signals.install(policy)
    steps, left_out = 0, 0

    def protocol_of(self: Trainer) -> StopProtocol:
        return StopProtocol(self.stop, rank, size, dist.FileStore(str(store)))

    passes = StopProtocol.stops_before

    def stops_before(self: StopProtocol, number: int) -> bool:
        nonlocal steps, left_out
        steps += number == 0 and self._kind == "step"
        if (steps, number, rank) == (step, point, chosen) and not stop.requested:
            os.kill(os.getpid(), signal.SIGTERM)
            while not stop.requested:
                time.sleep(0.001)
        if steps == step and number == point:
            while self._pause_at is None:  # all have heard of it
                time.sleep(0.001)
        ends = passes(self, number)
        left_out = left_out or (MICRO - number) * ends
        return ends

    try:
        with (
            patch.object(Trainer, "_stop_protocol", protocol_of),
            patch.object(StopProtocol, "stops_before", stops_before),
            patch.object(StopProtocol, "_rest_s", lambda self: float("inf")),
            patch.object(stop_protocol, "_POLL_S", 0.01),
        ):
            train(plan)
        return left_out, stop.exit_code, stop.cause
    finally:
        stop.uninstall()
