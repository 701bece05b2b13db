"""Runs of which one rank is told to stop inside a step, or computes what is not finite."""

import math
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor, nn

from gridformer.models import Model
from gridformer.train import stop_protocol, trainer
from gridformer.train.in_flight_steps import StartedStep
from gridformer.train.plan import Plan
from gridformer.train.step import Stepper
from gridformer.train.stop_protocol import StopProtocol
from gridformer.train.trainer import Trainer
from gridformer.utils import signals
from gridformer.utils.errors import DivergedError
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


LAYER = "layers.1.mlp"


def with_an_infinite_moment(plan: Plan, at: int) -> str:
    """Train, and on the last rank let a second moment become infinite once, before a step."""
    start, left = Stepper.start, [at] * (dist.get_rank() == dist.get_world_size() - 1)

    def started(stepper: Stepper, step: int, *args: Any) -> StartedStep:
        if step in left:
            left.remove(step)
            [*stepper.updates.state.values()][-1]["exp_avg_sq"].fill_(math.inf)
        return start(stepper, step, *args)

    with patch.object(Stepper, "start", started):
        return _error_of(plan)


def _error_of(plan: Plan) -> str:
    """Return the error that ends a run, or an empty text."""
    try:
        train(plan)
    except DivergedError as error:
        return str(error)
    return ""


def poisoned(plan: Plan, what: str, steps: set[int], times: int = 99) -> str:
    """Train, and in some steps let something of LAYER be infinite or NaN.

    Returns the error that ends the run, or an empty text.
    """
    build = trainer.build_parallel

    def built(*args: Any) -> Model:
        model, left = build(*args), times

        def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
            nonlocal left
            if model.dropout_rng.step not in steps or not model.training or left == 0:
                return None
            left -= 1
            if what == "output":
                return output * math.inf
            if what == "weights":
                next(module.parameters()).data.view(-1)[0] = math.nan
            elif output.requires_grad:
                output.register_hook(lambda grad: grad * math.nan)
            return None

        if layer := dict(model.named_modules()).get(LAYER):
            layer.register_forward_hook(hook)
        return model

    with patch.object(trainer, "build_parallel", built):
        return _error_of(plan)
