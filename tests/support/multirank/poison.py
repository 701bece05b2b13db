"""Runs in which something becomes infinite or NaN in some steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor, nn

from gridformer.models import Model
from gridformer.train import trainer
from gridformer.train.in_flight_steps import StartedStep
from gridformer.train.plan import Plan
from gridformer.train.step import Stepper
from gridformer.utils.errors import DivergedError
from tests.support.multirank.runs import train

LAYER = "layers.1.mlp"


class Poison:
    """Makes something of LAYER infinite in some steps."""

    def __init__(self, what: str, steps: set[int], times: int = 99) -> None:
        self.what, self.steps, self.times = what, steps, times

    def into(self, model: Model) -> None:
        for name, module in model.named_modules():
            if name == LAYER:
                module.register_forward_hook(self._hook(model))

    def _hook(self, model: Model) -> Callable[..., Tensor | None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
            if model.dropout_rng.step not in self.steps or not model.training or self.times == 0:
                return None
            self.times -= 1
            if self.what == "output":
                return output * math.inf
            if self.what == "weights":
                next(module.parameters()).data.view(-1)[0] = math.nan
            elif output.requires_grad:
                output.register_hook(lambda grad: grad * math.nan)
            return None

        return hook


def with_an_infinite_moment(plan: Plan, at: int) -> str:
    """Train, and on the last rank let a second moment become infinite once, before a step."""
    start, left = Stepper.start, [at] * (dist.get_rank() == dist.get_world_size() - 1)

    def started(stepper: Stepper, step: int, *args: Any) -> StartedStep:
        if step in left:
            left.remove(step)
            [*stepper.updates.state.values()][-1]["exp_avg_sq"].fill_(math.inf)
        return start(stepper, step, *args)

    with patch.object(Stepper, "start", started):
        try:
            train(plan)
        except DivergedError as error:
            return str(error)
    return ""


def poisoned(plan: Plan, what: str, steps: set[int], times: int = 99) -> str:
    """Train with poison; return the error that ends the run, or an empty text."""
    build = trainer.build_parallel

    def built(*args: Any) -> Model:
        model = build(*args)
        Poison(what, steps, times).into(model)
        return model

    with patch.object(trainer, "build_parallel", built):
        try:
            train(plan)
        except DivergedError as error:
            return str(error)
    return ""
