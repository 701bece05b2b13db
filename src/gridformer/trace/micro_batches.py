"""Traces three micro-batches of a step without a pipeline, and repeats the second one for others.

The first micro-batch gathers weights that stay, and in the last one sums of gradients begin; those
between do the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gridformer.config import RunConfig
from gridformer.trace.events import Event, Passed, Start
from gridformer.trace.group import Log
from gridformer.trace.repeat import plain
from gridformer.train.forward_backward import WholeModel

_RUN = 3


def fewer(run: RunConfig) -> RunConfig:
    """Reduces the micro-batches of a run without a pipeline; their size stays the same."""
    layout, train = run.layout, run.train
    if layout.pp > 1 or layout.micro_batches <= _RUN:
        return run
    batch = train.global_batch // layout.micro_batches * _RUN
    return run.model_copy(
        update={
            "layout": layout.model_copy(update={"micro_batches": _RUN}),
            "train": train.model_copy(update={"global_batch": batch}),
        }
    )


class MicroBatches:
    """Notes where the micro-batches of a trace begin.

    Args:
        passes: Runs them; one of its methods is replaced.
        log: The log of the rank.
    """

    def __init__(self, passes: WholeModel, log: Log) -> None:
        self.log = log
        self._begins: dict[tuple[str, int], int] = {}
        real = passes._timed

        @contextmanager
        def timed(kind: str, micro: int) -> Iterator[None]:
            self._begins[kind, micro] = len(log.trace.events)
            with real(kind, micro):
                yield

        replaced: Any = timed
        object.__setattr__(passes, "_timed", replaced)

    def repeat(self, more: int) -> None:
        """Adds this many copies of the second micro-batch to the trace."""
        trace, log = self.log.trace, self.log
        first, middle, last = (
            self._begins[place] for place in (("forward", 1), ("backward", 1), ("forward", 2))
        )
        events = trace.events
        parts = [plain(tuple(events[first:middle])), plain(tuple(events[middle:last]))]
        numbers = [e.number for part in parts for e in part if isinstance(e, Start)]
        found: list[Event] = [Passed(part, {n: n for n in numbers}) for part in parts]
        for _ in range(more):
            fresh = {number: log.next_number() for number in numbers}
            found += [Passed(part, fresh) for part in parts]
        trace.update += len(found) - (last - first)
        events[first:last] = found
