"""Times the actions of a pipeline, and computes the fraction of time that its ranks are idle."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from gridformer.parallel.pipeline.schedules import PASSES
from gridformer.utils.tensors import DeviceEvent


class Event(NamedTuple):
    """One timed action of a rank.

    Attributes:
        kind: One of `PASSES`, `send`, `recv` (waiting for a message) or another part of a step.
        stage: The stage, or -1 if the action belongs to none.
        micro: The micro-batch, or -1 if the action belongs to none.
        start: Start in seconds of `time.perf_counter`; of work on a GPU, the moment at which it
            begins there.
        end: The end in the same way.
    """

    kind: str
    stage: int
    micro: int
    start: float | DeviceEvent
    end: float | DeviceEvent

    @property
    def span(self) -> tuple[float, float]:
        """Start and end in seconds. Times of a GPU must have been converted by a `Clock`."""
        start, end = self.start, self.end
        assert not isinstance(start, DeviceEvent), "a GPU's time that no Clock has converted"
        assert not isinstance(end, DeviceEvent), "a GPU's time that no Clock has converted"
        return start, end


OnAction = Callable[[Event], None]


@contextmanager
def timed(
    on_action: OnAction | None, kind: str, stage: int = -1, micro: int = -1, on_gpu: bool = False
) -> Iterator[None]:
    """Reports the start and end of the work inside the context.

    Args:
        on_gpu: Whether the work is timed on the GPU. The host does not wait for the GPU: in a
            pipeline, a GPU may have posted the receive of a message that depends on what the host
            launches next.
    """
    if on_action is None:
        yield
        return
    began = _now(on_gpu)
    yield
    on_action(Event(kind, stage, micro, began, _now(on_gpu)))


def _now(on_gpu: bool) -> float | DeviceEvent:
    return DeviceEvent(torch.device("cuda")) if on_gpu else time.perf_counter()


class Clock:
    """Converts moments of a GPU to times of the host's clock. The device must be idle at first."""

    def __init__(self, device: torch.device) -> None:
        self.zero = time.perf_counter()
        self._moment = DeviceEvent(device)

    def told(self, event: Event) -> Event:
        """Returns an event with times of `time.perf_counter`, for which it waits for the device."""
        start, end = (
            self.zero + at.seconds_since(self._moment) if isinstance(at, DeviceEvent) else at
            for at in (event.start, event.end)
        )
        return event._replace(start=start, end=end)


def idle_fraction(ranks: Sequence[Sequence[Event]]) -> float:
    """Returns the idle time of all ranks in a step divided by their compute time.

    With equal stages it is (pp-1)/m for GPipe and 1F1B, 1/k of that with k stages per rank, and a
    third of it for ZB-H1 and ZB-V if all their passes take equal times.
    This is the pipeline bubble as a fraction of the ideal time (Narayanan et al. 2021, sections
    2.2.1 and 2.2.2).

    Args:
        ranks: The events of one step, for each rank, as `Clock.told` returns them. All clocks must
            agree, as those of processes on one machine do.
    """
    work = [event for events in ranks for event in events if event.kind in PASSES]
    spans = [event.span for event in work]
    began, ended = min(start for start, _ in spans), max(end for _, end in spans)
    busy = sum(end - start for start, end in spans)
    return (ended - began) * len(ranks) / busy - 1.0
