"""Steps that were launched and whose results are not read yet, and the results of steps.

A GPU gets the next step before the result of this one is read, so it never waits for the host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gridformer import comm
from gridformer.config import TrainConfig
from gridformer.mesh import Axis
from gridformer.train.loss_scale import FiniteCheck
from gridformer.utils.batch import Batch
from gridformer.utils.tensors import DeviceEvent


@dataclass(frozen=True)
class StepResult:
    """The result of one step, which is the same on every rank."""

    loss: float  # the sum of `losses`, which is minimized
    losses: dict[str, float]  # each loss as a mean over its targets in the global batch
    grad_norm: float  # the norm of all gradients before clipping; infinite or NaN if `skipped`
    lr: float
    tokens: int  # how many tokens of the global batch were read
    # Whether a rank raised its flag before this step, because it was told to stop
    flagged: bool = False
    skipped: bool = False  # whether float16 gradients overflowed, so that nothing was updated


@dataclass(frozen=True)
class Evaluation:
    """Mean losses over the evaluated batches; the loss is the sum of `losses`."""

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
        numbers: list[float] = self._numbers.tolist()
        return numbers


class StartedStep:
    """A step whose work has been launched.

    Attributes:
        step: Its number, counted from 0.
        began: An event made before the step was launched.
        ended: When the device is done with the step and its update; set when that is launched.
        data_wait_s: For how many seconds its launch waited for the batch to be made.
        peak: The largest peak of memory on GPUs, see `start_largest_peak`; None on CPUs.
    """

    began: DeviceEvent
    ended: DeviceEvent
    data_wait_s: float = 0.0
    peak: Copied | None = None

    def __init__(
        self,
        check: FiniteCheck,
        step: int,
        lr: float,
        scale: float,
        losses: list[str],
        copied: Copied,
    ) -> None:
        self.step = step
        self._check, self._lr, self._scale = check, lr, scale
        self._losses, self._copied = losses, copied
        self._result: StepResult | None = None

    @property
    def seconds(self) -> float:
        """How long the device took for it, with the update and with waiting for the host."""
        return self.ended.seconds_since(self.began)

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
        updated = self._check(self.step, loss, norm)
        self._result = StepResult(
            loss, parts, norm, self._lr, tokens, flags > 0, skipped=not updated
        )
        return self._result


def max_in_flight(train: TrainConfig, device: torch.device) -> int:
    """Returns how many steps a run may have in flight while it launches the next one.

    With float16 and `update: in_backward` the host waits for each step anyway, and on a CPU the
    step is over when its launch returns.
    """
    return int(device.type == "cuda" and not train.waits_each_step)


def peak_bytes(device: torch.device) -> int | None:
    """Returns the most bytes that tensors have taken on a GPU; None on a CPU, where none counts."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def start_largest_peak(device: torch.device, world: Axis) -> Copied | None:
    """Launches the search for the largest peak of memory of all processes; no host waits for it.

    All ranks call it together, after they have launched a step. The host knows what the step takes
    as soon as it is launched.

    Returns:
        The bytes that tensors have taken, on their way to the host; None on CPUs.
    """
    peak = peak_bytes(device)
    if peak is None:
        return None
    mine = torch.full((1,), peak, dtype=torch.int64, device=device)  # a copy would wait
    return Copied(comm.all_reduce(mine, world, "max", label="metrics"))
