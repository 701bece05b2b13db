"""Learning-rate schedules: the rate of a step is a function of its number and the config alone.

So a resumed run goes on with the rates that it would have had, and nothing is saved for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from gridformer.config import DecayShape, LRSchedule, TrainConfig


def learning_rate(step: int, train: TrainConfig) -> float:
    """Returns the learning rate of a step.

    It rises linearly to `lr` over `warmup_steps`, and then follows `lr_schedule`.

    Args:
        step: The number of the step, counted from 0.
        train: The training config.
    """
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    return train.lr * _SCHEDULES[train.lr_schedule](step, train)


# --------------------------------------------------------------------------- after the warm-up


def _constant(step: int, train: TrainConfig) -> float:
    return 1.0


def _cosine(step: int, train: TrainConfig) -> float:
    """Falls along half a wave of a cosine (Loshchilov and Hutter 2017) until the last step."""
    return _fall("cosine", _progress(step, train.warmup_steps, train), train)


def _linear(step: int, train: TrainConfig) -> float:
    return _fall("linear", _progress(step, train.warmup_steps, train), train)


def _warmup_stable_decay(step: int, train: TrainConfig) -> float:
    """Stays, and falls over the last steps (Hu et al. 2024; "1-sqrt": Hägele et al. 2024)."""
    last_stable = train.steps - 1 - train.decay_steps
    return _fall(train.decay_shape, _progress(step, last_stable, train), train)


def _inverse_sqrt(step: int, train: TrainConfig) -> float:
    """Falls as 1 / sqrt(step), from lr at the end of the warm-up (Vaswani et al. 2017)."""
    return math.sqrt(train.warmup_steps / (step + 1))


_SCHEDULES: dict[LRSchedule, Callable[[int, TrainConfig], float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
    "wsd": _warmup_stable_decay,
    "inverse_sqrt": _inverse_sqrt,
}

# The part of the rate's fall that remains after a fraction x of its steps: 1 at x = 0, 0 at x = 1.
_SHAPES: dict[DecayShape, Callable[[float], float]] = {
    "linear": lambda x: 1.0 - x,
    "cosine": lambda x: 0.5 * (1.0 + math.cos(math.pi * x)),
    "1-sqrt": lambda x: 1.0 - math.sqrt(x),
}


def _progress(step: int, start: int, train: TrainConfig) -> float:
    """Returns how far a step is from `start`, where it is 0, to the last step, where it is 1."""
    return min(1.0, max(0.0, (step - start) / max(1, train.steps - 1 - start)))


def _fall(shape: DecayShape, progress: float, train: TrainConfig) -> float:
    return train.min_lr_ratio + (1.0 - train.min_lr_ratio) * _SHAPES[shape](progress)
