"""What a pipeline did when, and how much of the time its ranks had nothing to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch


class Event(NamedTuple):
    """Something one rank did. kind: `forward`, `backward`, `send`, `recv` (the wait for a message)
    or another part of a step; stage and micro are -1 where it is of none; start, end: seconds of
    `time.perf_counter`."""

    kind: str
    stage: int
    micro: int
    start: float
    end: float


OnAction = Callable[[Event], None]


@contextmanager
def timed(
    told: OnAction | None, kind: str, stage: int = -1, micro: int = -1, on_gpu: bool = False
) -> Iterator[None]:
    """Tell when what is done inside began and ended; nothing if nobody listens. On a GPU it is
    waited for then, so that times are those of the work."""
    if told is None:
        yield
        return
    began = _now(on_gpu)
    yield
    told(Event(kind, stage, micro, began, _now(on_gpu)))


def _now(on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


def idle_fraction(ranks: Sequence[Sequence[Event]]) -> float:
    """Of a step: the time in which ranks do not compute, over the time in which they do.

    (pp-1)/m for GPipe and 1F1B with equal stages, 1/k of that with k of them a rank (Narayanan et
    al. 2021, sections 2.2.1 and 2.2.2), which call it the bubble's share of the ideal time.

    Args:
        ranks: the events of one step, by rank. Their clocks must be one: processes of a machine
            share it.
    """
    work = [
        [event for event in events if event.kind in ("forward", "backward")] for events in ranks
    ]
    began = min(event.start for events in work for event in events)
    ended = max(event.end for events in work for event in events)
    busy = sum(event.end - event.start for events in work for event in events)
    return (ended - began) * len(ranks) / busy - 1.0
