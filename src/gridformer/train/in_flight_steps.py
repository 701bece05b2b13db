"""Steps that were launched and whose results are not read yet, their results, and the loss scale.

A GPU gets the next step before the result of this one is read, so it never waits for the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gridformer import comm
from gridformer.config import TrainConfig
from gridformer.mesh import Axis
from gridformer.utils.errors import DivergedError
from gridformer.utils.tensors import DeviceEvent

FIRST_SCALE = 2.0**16
GROWS_AFTER = 1000  # steps without an overflow
LARGEST_SCALE = 2.0**24


@dataclass
class LossScale:
    """Dynamic loss scaling, which keeps float16 gradients within the range of float16.

    float16 ends at 65,504 and loses digits below 6e-5. The loss is multiplied by a power of two
    before the backward pass, and the gradients, which are float32 by then, are divided by it
    afterward (Micikevicius et al. 2018, section 3.2). A step whose gradients overflow on any rank
    is skipped on all ranks and halves the scale; many good steps in a row double it. If the forward
    pass overflows, no scale helps: the loss is then NaN and the run ends.
    """

    scale: float = 1.0  # the factor on the loss; always 1 unless `dynamic`
    good: int = 0  # number of good steps since the scale last changed
    skipped: int = 0  # number of skipped steps in the whole run
    dynamic: bool = False  # whether the scale changes, which it does for float16

    @staticmethod
    def of(dtype: str) -> LossScale:
        """Returns the scale with which a run in `dtype` (as in `train.dtype`) starts."""
        half = dtype == "float16"
        return LossScale(FIRST_SCALE if half else 1.0, dynamic=half)

    @property
    def exhausted(self) -> bool:
        """Whether a smaller scale cannot help against an overflow."""
        return not self.dynamic or self.scale <= 1.0

    def go_on(self, scale: float, good: int) -> None:
        """Resumes from the scale and the good steps of a float16 run's checkpoint."""
        if self.dynamic:
            self.scale, self.good = scale, good

    def overflowed(self) -> None:
        """Counts a skipped step and halves the scale."""
        self.scale, self.good, self.skipped = self.scale / 2, 0, self.skipped + 1

    def succeeded(self) -> None:
        """Counts a good step; after GROWS_AFTER of them in a row, doubles the scale."""
        if not self.dynamic:
            return
        self.good += 1
        if self.good >= GROWS_AFTER:
            self.scale, self.good = min(2 * self.scale, LARGEST_SCALE), 0

    def judge(self, train: TrainConfig, step: int, loss: float, norm: float) -> bool:
        """Adapts the scale to the loss and the gradient norm of a step.

        Returns:
            Whether the step has updated the parameters.

        Raises:
            DivergedError: The loss or the norm is not finite, and no smaller loss scale can help.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            self.succeeded()
            return True
        if math.isfinite(loss) and not self.exhausted:
            self.overflowed()
            return False
        unchanged = "nothing was updated"
        if train.update == "in_backward":
            unchanged = "layers were updated before this was known, so resume from a checkpoint"
        # It helps if the forward pass, or gradients at loss scale 1, overflow.
        wider = ", use train.dtype=bfloat16" if train.dtype == "float16" else ""
        raise DivergedError(
            f"step {step + 1}: the loss is {loss:g} and the gradient norm {norm:g}; {unchanged}. "
            f"Lower train.lr ({train.lr:g}), raise train.warmup_steps ({train.warmup_steps})"
            f"{wider} or inspect the data of this step",
            step,
        )


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
    experts: Sequence[Any] = ()  # how many tokens each expert of each layer got


@dataclass(frozen=True)
class Evaluation:
    """Mean losses over the evaluated batches; the loss is the sum of `losses`."""

    loss: float
    losses: dict[str, float]


class Copied:
    """Numbers on their way from a device to the host, which waits for them only to read them."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers.to("cpu", non_blocking=True)  # a GPU's go to pinned memory
        self._arrived: torch.cuda.Event | None = None
        if numbers.device.type == "cuda":
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> list[Any]:
        """Waits until the numbers have come, and returns them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers: list[Any] = self._numbers.tolist()
        return numbers


class StartedStep:
    """A step whose work has been launched.

    Args:
        check: `LossScale.judge`, which gets the step, its loss and its gradient norm. It does not
            know the `Stepper`, so that a step whose result nobody reads keeps no model alive.

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
        check: Callable[[int, float, float], bool],
        step: int,
        lr: float,
        scale: float,
        losses: list[str],
        copied: Copied,
        experts: Copied | None = None,
    ) -> None:
        self.step = step
        self._check, self._lr, self._scale = check, lr, scale
        self._losses, self._copied, self._experts = losses, copied, experts
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
        self._result = StepResult(loss, parts, norm, self._lr, tokens, flags > 0, not updated)
        if self._experts is not None:
            self._result = replace(self._result, experts=self._experts.read())
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
