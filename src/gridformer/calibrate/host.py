"""The time that the host adds to the operators of a training step, measured on tiny models.

Two models that differ in their number of layers run whole training steps. Their difference gives
the time per operator; the rest is the time of a step that depends on no layer.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gridformer.calibrate.clock import Meet, cpu_seconds
from gridformer.config import LayoutConfig, ModelConfig, TrainConfig
from gridformer.mesh import Axes
from gridformer.parallel import build_parallel
from gridformer.record.kernels import launched_work
from gridformer.train.step import Ahead, Stepper
from gridformer.utils.batch import next_words
from gridformer.utils.placeholder_module import without_dynamo
from gridformer.utils.torch_private import DispatchMode

_LAYERS = (2, 8)
_TOKENS = 16
_ROUNDS = 5  # in which the two models take turns


@dataclass(frozen=True)
class HostTime:
    """Seconds.

    Attributes:
        launch_s: Time per operator that computes something, its Python code included. On a CPU,
            where the host itself computes, the time of the computation is left out.
        step_s: Time of a step that depends on no layer.
    """

    launch_s: float
    step_s: float


@without_dynamo()
def measure_host(device: torch.device, dtype: str, steps: int, meet: Meet) -> HostTime:
    """Measures training steps of two tiny GPT-2 on one device.

    Args:
        device: The device.
        dtype: The data type of the computation.
        steps: Timed steps of each model in a row.
        meet: A barrier of all processes, which measure at the same time.
    """
    steppers = [_stepper(n_layers, device, dtype) for n_layers in _LAYERS]
    launches = []
    for step in steppers:
        for _ in range(2):
            step()
        with _Count(device) as count:
            step()
        launches.append(count.launches)

    def seconds_of(step: Callable[[], object]) -> float:
        meet()
        start = time.perf_counter()
        for _ in range(steps):
            step()  # it waits for the step before
        return (time.perf_counter() - start) / steps

    rounds = [[seconds_of(step) for step in steppers] for _ in range(_ROUNDS)]
    few = statistics.median(small for small, _ in rounds)
    many = statistics.median(large - small for small, large in rounds)
    launch_s = many / (launches[1] - launches[0])
    step_s = few - launches[0] * launch_s
    if device.type == "cpu":
        x = torch.ones(64)
        launch_s -= cpu_seconds([lambda: x + x], 0.03, meet)
    return HostTime(max(launch_s, 1e-7), max(step_s, 1e-6))


def _stepper(n_layers: int, device: torch.device, dtype: str) -> Any:
    config = ModelConfig(
        name="tiny", n_layers=n_layers, hidden_size=64, n_heads=4, vocab_size=128, max_seq_len=16
    )
    train = TrainConfig.model_validate({"global_batch": 1, "dtype": dtype, "steps": 100_000})
    model = build_parallel(config, LayoutConfig(), Axes(), 0, device, train.dtype)
    run_step = Ahead(Stepper(model, train, Axes()))
    tokens = torch.randint(0, 128, (1, _TOKENS + 1), device=device)
    number = itertools.count()
    return lambda: run_step(next(number), lambda rows: next_words(tokens[rows]))


class _Count(DispatchMode):
    """Counts the operators that launch something, as a trace does."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.launches, self.device = 0, device.type

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.launches += launched_work(func, args, kwargs, out, self.device) is not None
        return out
