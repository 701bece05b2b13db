"""The results of steps and evaluations, and steps whose result is not read yet."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gridformer.utils.batch import Batch

if TYPE_CHECKING:
    from gridformer.train.step import Stepper


@dataclass(frozen=True)
class StepResult:
    """The result of one step, which is the same on every rank.

    Attributes:
        loss: The sum of `losses`, which is minimized.
        losses: Each loss as a mean over its targets in the global batch.
        grad_norm: The norm of all gradients before clipping; infinite or NaN if `skipped`.
        lr: The learning rate.
        tokens: How many tokens of the global batch were read.
        flagged: Whether a rank raised its flag before this step, because it was told to stop.
        skipped: Whether float16 gradients overflowed, so that nothing was updated.
    """

    loss: float
    losses: dict[str, float]
    grad_norm: float
    lr: float
    tokens: int
    flagged: bool = False
    skipped: bool = False


@dataclass(frozen=True)
class Evaluation:
    """Mean losses over the evaluated batches; see `StepResult`."""

    loss: float
    losses: dict[str, float]


@dataclass(frozen=True)
class Repeated:
    """What a step computes if it is repeated: this rank's batch and its part of the losses."""

    batch: Batch
    losses: dict[str, Tensor]
    tokens: int


class Copied:
    """Numbers on their way from a device to the host, which waits for them only to read them."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers.to("cpu", non_blocking=True)  # a GPU's go to pinned memory
        self._arrived: torch.cuda.Event | None = None
        if numbers.device.type == "cuda":
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> list[float]:
        if self._arrived is not None:
            self._arrived.synchronize()
        found: list[float] = self._numbers.tolist()
        return found


class Moment:
    """When a device is done with all work that was launched before this was made.

    Between two of them lies the time that the device took, however far ahead of it the host is.
    """

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        self._time = time.perf_counter()

    def seconds_since(self, earlier: Moment) -> float:
        """Waits for this moment and returns the seconds from an earlier one of the same device."""
        if self._event is None or earlier._event is None:
            return self._time - earlier._time
        self._event.synchronize()
        return earlier._event.elapsed_time(self._event) / 1e3


class StartedStep:
    """A step whose work has been launched.

    Attributes:
        ended: When the device is done with the step and its update; set when that is launched.
    """

    def __init__(
        self,
        stepper: Stepper,
        step: int,
        lr: float,
        scale: float,
        losses: list[str],
        copied: Copied,
    ) -> None:
        self._stepper, self._step, self._lr, self._scale = stepper, step, lr, scale
        self._losses, self._copied = losses, copied
        self._result: StepResult | None = None
        self.ended: Moment | None = None

    def result(self) -> StepResult:
        """Waits until the device has computed the loss and the norm, and returns the result.

        All ranks call it together, in the order of steps. Further calls return the same.

        Raises:
            DivergedError: The loss or the gradient norm is not finite, and no smaller loss scale
                can help. All ranks raise it.
        """
        if self._result is not None:
            return self._result
        numbers, n = self._copied.read(), len(self._losses)
        means, square = numbers[:n], numbers[n]
        divisors, (tokens, flags) = numbers[n + 2 : -2], map(int, numbers[-2:])
        parts = {
            name: total / max(1, count) for name, total, count in zip(self._losses, means, divisors)
        }
        loss, norm = sum(parts.values()), math.sqrt(square) / self._scale
        updated = self._stepper.check_finite(self._step, loss, norm)
        self._result = StepResult(
            loss, parts, norm, self._lr, tokens, flags > 0, skipped=not updated
        )
        return self._result
