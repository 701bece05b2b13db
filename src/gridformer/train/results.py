"""The results of steps and evaluations, and steps whose result is not read yet."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gridformer.config import TrainConfig
from gridformer.train.loss_scale import LossScale
from gridformer.utils.batch import Batch
from gridformer.utils.errors import DivergedError
from gridformer.utils.tensors import DeviceEvent


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
    """The result of a repeated step: this rank's batch and its part of the losses."""

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
        """Waits until the numbers have come, and returns them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        found: list[float] = self._numbers.tolist()
        return found


@dataclass(frozen=True)
class FiniteCheck:
    """Judges whether the loss and the gradient norm of a step are finite.

    It does not know the `Stepper`, so that a step whose result nobody reads keeps no model alive.

    Attributes:
        train: The training config.
        scale: The loss scale, which it adapts.
    """

    train: TrainConfig
    scale: LossScale

    def __call__(self, step: int, loss: float, norm: float) -> bool:
        """Returns whether a step has updated the parameters, and adapts the loss scale.

        Raises:
            DivergedError: The loss or the norm is not finite, and no smaller loss scale can help.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            self.scale.succeeded()
            return True
        if math.isfinite(loss) and not self.scale.exhausted:
            self.scale.overflowed()
            return False
        raise DivergedError(
            f"step {step + 1}: the loss is {loss:g} and the gradient norm {norm:g}; "
            f"{self._unchanged()}. Lower train.lr ({self.train.lr:g}), raise "
            f"train.warmup_steps ({self.train.warmup_steps}){self._wider()} or inspect the "
            "data of this step",
            step,
        )

    def _unchanged(self) -> str:
        if self.train.update == "in_backward":
            return "layers were updated before this was known, so resume from a checkpoint"
        return "nothing was updated"

    def _wider(self) -> str:
        """The remedy if the forward pass, or gradients at loss scale 1, overflow float16."""
        return ", use train.dtype=bfloat16" if self.train.dtype == "float16" else ""


class StartedStep:
    """A step whose work has been launched.

    Attributes:
        ended: When the device is done with the step and its update; set when that is launched.
    """

    def __init__(
        self,
        check: FiniteCheck,
        step: int,
        lr: float,
        scale: float,
        losses: list[str],
        copied: Copied,
    ) -> None:
        self._check, self._step, self._lr, self._scale = check, step, lr, scale
        self._losses, self._copied = losses, copied
        self._result: StepResult | None = None
        self.ended: DeviceEvent | None = None

    def wait(self) -> None:
        """Waits until the device has computed the loss and the norm."""
        self._copied.read()

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
        updated = self._check(self._step, loss, norm)
        self._result = StepResult(
            loss, parts, norm, self._lr, tokens, flags > 0, skipped=not updated
        )
        return self._result
