"""The steps that were launched and whose results are not read yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch

from gridformer.config import TrainConfig
from gridformer.train.results import Copied, StartedStep, StepResult
from gridformer.utils.tensors import DeviceEvent


class FinishedStep(NamedTuple):
    """A step that is over.

    Attributes:
        step: Its number, counted from 0.
        result: Its result.
        seconds: How long the device took for it, with the update and with waiting for the host.
        data_wait_s: For how many of these its launch waited for the batch to be made.
        peak: The most bytes that the tensors of any process have taken so far; None on CPUs.
    """

    step: int
    result: StepResult
    seconds: float
    data_wait_s: float
    peak: int | None


class StepsUnderWay:
    """Launched steps, oldest first.

    A GPU gets the next step before the result of this one is read, so it never waits for the host.

    Args:
        lag: How many steps may be under way while nothing else is due.
    """

    def __init__(self, lag: int) -> None:
        self.lag = lag
        self._started: deque[tuple[int, DeviceEvent, StartedStep, float, Copied | None]] = deque()

    def add(
        self,
        step: int,
        began: DeviceEvent,
        started: StartedStep,
        data_wait_s: float,
        peak: Copied | None = None,
    ) -> None:
        """Adds a step.

        Args:
            step: Its number, counted from 0.
            began: A moment made before the step was launched.
            started: The step.
            data_wait_s: For how many seconds its launch waited for the batch to be made.
            peak: The largest peak of memory on GPUs; see `start_largest`.
        """
        self._started.append((step, began, started, data_wait_s, peak))

    def end(self, left: int) -> Iterator[FinishedStep]:
        """Waits for steps until only `left` are under way, or for all if a rank was told to stop.

        Raises:
            DivergedError: A step was not finite.
        """
        while len(self._started) > left:
            step, began, started, data_wait_s, peak = self._started.popleft()
            result = started.result()
            assert started.ended is not None
            seconds = started.ended.seconds_since(began)
            left = 0 if result.flagged else left
            n_bytes = None if peak is None else int(peak.read()[0])
            yield FinishedStep(step, result, seconds, data_wait_s, n_bytes)

    def clear(self) -> None:
        """Forgets all steps. After one that was not finite, those after it have updated nothing."""
        self._started.clear()


def lag_of(train: TrainConfig, device: torch.device) -> int:
    """Returns how many steps a run may have under way.

    With float16 and `update: in_backward` the host waits for each step anyway, and on a CPU the
    step is over when its launch returns.

    Args:
        train: The settings of the run.
        device: The device of this process.
    """
    return int(device.type == "cuda" and not train.waits_each_step)
