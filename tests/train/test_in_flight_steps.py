"""Times of steps that are in flight are those of the device, not of when the host asked."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch

from gridformer.train.in_flight_steps import StartedStep
from gridformer.utils import tensors
from gridformer.utils.tensors import DeviceEvent

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def a_second_a_moment() -> Iterator[None]:
    """Every look at the clock is a second later."""
    with patch.object(tensors.time, "perf_counter", itertools.count().__next__):
        yield


def test_a_step_that_is_read_late_took_no_longer() -> None:
    step = StartedStep.__new__(StartedStep)
    step.began, step.ended = DeviceEvent(CPU), DeviceEvent(CPU)
    for _ in range(5):
        tensors.time.perf_counter()
    assert step.seconds == 1.0


class Event:
    """A CUDA event of a device that takes 2 s for all that is launched between two of them."""

    made = 0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.made += 1
        self.at = 2000.0 * Event.made

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, later: Event) -> float:
        assert later.waited
        return later.at - self.at


def test_a_gpu_tells_the_time_of_its_steps() -> None:
    with patch.object(torch.cuda, "Event", Event):
        began, ended = (DeviceEvent(torch.device("cuda", 0)) for _ in range(2))
        assert ended.seconds_since(began) == 2.0
