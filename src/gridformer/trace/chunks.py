"""Traces three chunks of a chunked loss, and repeats the second one for the others.

The first chunk begins the sum of the losses, and the last one may be smaller; those between do the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar
from unittest.mock import patch

from gridformer.models.blocks import loss
from gridformer.trace.events import Event, Start, Wait
from gridformer.trace.group import Log

Chunk = TypeVar("Chunk")


@contextmanager
def trace_chunks_once(log: Log, count: Callable[[int], int]) -> Iterator[None]:
    """Runs equal chunks of losses once, inside the context.

    Args:
        log: The log of the rank.
        count: Adds to the number of matrix products so far, and returns it.
    """

    def each(chunks: Sequence[Chunk]) -> Iterator[Chunk]:
        events, reads = log.trace.events, log.trace.reads
        if len(chunks) < 4:
            yield from chunks
            return
        yield chunks[0]
        begin, products, n_reads = len(events), count(0), len(reads)
        yield chunks[1]
        one = events[begin:]
        if _repeatable(one) and len(reads) == n_reads:
            products = count(0) - products
            for _ in chunks[2:-1]:
                events.extend(_again(one, log))
                count(products)
        else:
            yield from chunks[2:-1]
        yield chunks[-1]

    with patch.object(loss, "loop", each):
        yield


def _repeatable(events: Sequence[Event]) -> bool:
    """Whether a chunk waits for its own messages only, and for all of them."""
    started = [event.number for event in events if isinstance(event, Start)]
    waited = [event.number for event in events if isinstance(event, Wait)]
    return sorted(started) == sorted(waited)


def _again(events: Sequence[Event], log: Log) -> Iterator[Event]:
    numbers: dict[int, int] = {}
    for event in events:
        if isinstance(event, Start):
            numbers[event.number] = log.next_number()
            yield event.numbered(numbers[event.number])
        elif isinstance(event, Wait):
            yield Wait(numbers[event.number], event.place)
        else:
            yield event
