"""How much of a step's communication is hidden behind computation, from torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

Span = tuple[float, float]  # begin and end, in microseconds


@dataclass(frozen=True)
class Overlap:
    """The kernels of one step on one GPU.

    Attributes:
        computing_s: Seconds in which at least one kernel computes.
        communicating_s: Seconds in which at least one message is under way.
        exposed_s: The part of `communicating_s` in which nothing computes.
    """

    computing_s: float
    communicating_s: float
    exposed_s: float

    @property
    def hidden(self) -> float:
        """The share of the communication that is hidden; NaN without communication."""
        if not self.communicating_s:
            return float("nan")
        return 1 - self.exposed_s / self.communicating_s


def profile(step: Callable[[], object]) -> Overlap:
    """Runs one step under torch's profiler. A message of NCCL is a kernel whose name begins so.

    The time of a message's kernel includes waiting for the peers to arrive.
    """
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profiler:
        step()
        torch.cuda.synchronize()
    computing: list[Span] = []
    communicating: list[Span] = []
    for event in profiler.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        span = float(event.time_range.start), float(event.time_range.end)
        (communicating if "nccl" in event.name.lower() else computing).append(span)
    return overlap_of(computing, communicating)


def overlap_of(computing: Iterable[Span], communicating: Iterable[Span]) -> Overlap:
    """Counts the overlap of two sets of time spans, each of which may overlap within itself."""
    computing, communicating = [*computing], [*communicating]
    busy = covered(computing)
    return Overlap(
        computing_s=busy / 1e6,
        communicating_s=covered(communicating) / 1e6,
        exposed_s=(covered([*computing, *communicating]) - busy) / 1e6,
    )


def covered(spans: Iterable[Span]) -> float:
    """Returns the length of the union of time spans."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        if end > until:
            total += end - max(begin, until)
            until = end
    return total
