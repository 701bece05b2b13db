"""Traces a pipeline's step again with fewer micro-batches, from the passes that were recorded.

A step with fewer micro-batches has the same passes in another order. So the real code runs up to
the passes, which are repeated in their new order, and what comes after all passes is repeated, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from gridformer.config import RunConfig
from gridformer.parallel.pipeline import Executor
from gridformer.trace.batch import rows_like
from gridformer.trace.events import Event, Start, Trace
from gridformer.trace.fake import Watch
from gridformer.trace.group import Log
from gridformer.trace.repeat import Repeats
from gridformer.train.rows import RowSplit
from gridformer.train.step import Stepper


class _AllPassesOver(Exception):  # noqa: N818
    """All passes of the step are over."""


def trace_again(
    run: RunConfig,
    trace: Trace,
    repeats: Repeats,
    stepper: Stepper,
    executor: Executor,
    log: Log,
    watch: Watch,
) -> tuple[Trace, Repeats] | None:
    """Traces the step of a rank that has just been traced with fewer micro-batches.

    Args:
        run: The run with fewer micro-batches of the same size.
        trace: The trace with all of them.
        repeats: Recorded its passes.
        stepper: Ran the step.
        executor: Ran its passes.
        log: The log of the rank.
        watch: The watch on its operations.

    Returns:
        The trace, and the `Repeats` that repeated its passes; None if a pass was not recorded.
    """
    after: Sequence[Event] = trace.events[repeats.span[1] :]
    repeats.undo()
    stepper.forget()
    executor.layout = run.layout
    stepper.micro_batches = run.layout.micro_batches
    stepper.split = RowSplit(run.train.global_batch, stepper.micro_batches, stepper.axes)
    watch.products = 0
    # The recorded passes wait for messages that began before them, by their numbers.
    before = [one.number for one in trace.events[: repeats.span[0]] if isinstance(one, Start)]
    if before:
        log.number_from(before[0])
    log.trace = replace(trace, events=[], reads=[], troubles=[], complete=False, update=0)
    recorded, stamps = repeats.recorded, repeats.stamps
    again = Repeats(stepper.model, executor, log, watch.count, recorded, stamps=stamps)
    if again.missing:
        return None
    repeated = executor.train

    def train(*args: Any) -> None:
        repeated(*args)
        raise _AllPassesOver

    object.__setattr__(executor, "train", train)
    with suppress(_AllPassesOver):
        stepper.start(0, partial(rows_like, run))
    del log.trace.events[again.span[1] :]  # of contexts that were left early
    log.trace.update = len(log.trace.events)
    again.repeat(after)
    log.trace.reads, log.trace.complete = trace.reads, True
    return log.trace, again
