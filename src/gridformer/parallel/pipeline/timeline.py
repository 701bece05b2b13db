"""Times the actions of a pipeline, and computes the fraction of time that its ranks are idle."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch


class Event(NamedTuple):
    """One timed action of a rank.

    Attributes:
        kind: `forward`, `backward`, `send`, `recv` (waiting for a message) or another part of a
            step.
        stage: The stage, or -1 if the action belongs to none.
        micro: The micro-batch, or -1 if the action belongs to none.
        start: Start in seconds of `time.perf_counter`.
        end: End in seconds of `time.perf_counter`.
    """

    kind: str
    stage: int
    micro: int
    start: float
    end: float


OnAction = Callable[[Event], None]


@contextmanager
def timed(
    on_action: OnAction | None, kind: str, stage: int = -1, micro: int = -1, on_gpu: bool = False
) -> Iterator[None]:
    """Reports the start and end of the work inside the context.

    Args:
        on_action: Receives the event when the work is done; None reports nothing.
        kind: What the work is; see `Event`.
        stage: The pipeline stage, or -1 if the work belongs to none.
        micro: The micro-batch, or -1 if the work belongs to none.
        on_gpu: Whether to synchronize the GPU before and after, so that work on it is timed, too.
    """
    if on_action is None:
        yield
        return
    began = _now(on_gpu)
    yield
    on_action(Event(kind, stage, micro, began, _now(on_gpu)))


def _now(on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


def idle_fraction(ranks: Sequence[Sequence[Event]]) -> float:
    """Returns the idle time of all ranks in a step divided by their compute time.

    With equal stages it is (pp-1)/m for GPipe and 1F1B, and 1/k of that with k stages per rank.
    This is the pipeline bubble as a fraction of the ideal time (Narayanan et al. 2021, sections
    2.2.1 and 2.2.2).

    Args:
        ranks: The events of one step, for each rank. All clocks must agree, as those of processes
            on one machine do.
    """
    work = [
        [event for event in events if event.kind in ("forward", "backward")] for events in ranks
    ]
    began = min(event.start for events in work for event in events)
    ended = max(event.end for events in work for event in events)
    busy = sum(event.end - event.start for events in work for event in events)
    return (ended - began) * len(ranks) / busy - 1.0
