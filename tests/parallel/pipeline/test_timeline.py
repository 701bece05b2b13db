"""Times of actions on a GPU, for which the host must not wait; see Executor.loads."""

from __future__ import annotations

import itertools
from unittest.mock import patch

import pytest
import torch

from gridformer.parallel.pipeline import Clock, Event, idle_fraction, timed


class OnGpu:
    """A CUDA event; the GPU comes to each 0.5 s after the one before."""

    numbers = itertools.count()

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = 500.0 * next(self.numbers)

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: OnGpu) -> float:
        return later.at - self.at


def test_actions_on_a_gpu_are_timed_without_waiting_for_it() -> None:
    seen: list[Event] = []
    with (
        patch.object(torch.cuda, "Event", OnGpu),
        patch.object(torch.cuda, "synchronize", side_effect=AssertionError("the host waits")),
    ):
        clock = Clock(torch.device("cuda"))
        with timed(seen.append, "forward", 0, 1, on_gpu=True):
            pass
        with timed(seen.append, "backward", 0, 1, on_gpu=True):
            pass
        with timed(seen.append, "read the batch"):
            pass
        with pytest.raises(AssertionError, match="no Clock has converted"):
            idle_fraction([seen])
        told = [clock.told(event) for event in seen]
    assert [event.kind for event in told] == ["forward", "backward", "read the batch"]
    spans = [event.span for event in told]
    assert [(start - clock.zero, end - clock.zero) for start, end in spans[:2]] == [
        (pytest.approx(0.5), pytest.approx(1.0)),
        (pytest.approx(1.5), pytest.approx(2.0)),
    ]
    assert spans[2] == (seen[2].start, seen[2].end), "the host's own work has its own time"
    # The device computes for 1.0 s of the 1.5 s.
    assert idle_fraction([told]) == pytest.approx(0.5)
