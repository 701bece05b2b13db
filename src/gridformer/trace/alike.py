"""Traces ranks of a pipeline whose stages have equal layers: one is run, the others follow from it.

Such ranks run the same passes in different orders. The pipeline's own code runs the order of each
rank and sends its messages between stages; what happens inside a pass, and before and after all
passes, is that of the rank that was run, in the groups of the rank that is traced.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gridformer.config import RunConfig
from gridformer.mesh import Axes
from gridformer.parallel.auto.decisions import Decisions
from gridformer.parallel.axes import build_axes, split_heads
from gridformer.parallel.data.gradients import GradientSums
from gridformer.parallel.pipeline import Executor, stages_of
from gridformer.parallel.pipeline.partition import model_outline
from gridformer.trace.batch import rows_like
from gridformer.trace.device import Backend
from gridformer.trace.events import Event, Start, Trace
from gridformer.trace.fake import Watch, watched_fakes
from gridformer.trace.group import Log
from gridformer.trace.known_stages import KnownStages
from gridformer.trace.rank import Played, on_devices, play
from gridformer.trace.repeat import Repeats
from gridformer.trace.translation import translation
from gridformer.utils.batch import Batch, MicroBatch


def trace_alike(
    run: RunConfig,
    ranks: Sequence[int],
    decisions: Decisions,
    kernels: bool = False,
    backend: Backend = "nccl",
) -> list[Trace]:
    """Traces ranks that differ only in their place along pp, and whose stages have equal layers.

    Args:
        run: The checked run.
        ranks: The ranks. The first is run; one with passes that the first does not have is run,
            too.
        decisions: The result of `decide_run(run)`.
        kernels, backend: See `trace_rank`.
    """
    return trace_runs([run], ranks, decisions, kernels, backend)[0]


def trace_runs(
    runs: Sequence[RunConfig],
    ranks: Sequence[int],
    decisions: Decisions,
    kernels: bool = False,
    backend: Backend = "nccl",
    known: KnownStages | None = None,
    training: bool = True,
) -> list[list[Trace]]:
    """Does what `trace_alike` does, for a run and the same one with fewer micro-batches.

    Args:
        runs: The run, and that with fewer micro-batches of the same size if it is asked for.
        ranks, decisions, kernels, backend: See `trace_alike`.
        known: The stages that ranks of other calls have recorded. Those of these ranks are added.
        training: See `trace_rank`.

    Returns:
        The traces of each run.
    """
    how = decisions, kernels, backend, training
    first = _run(runs, ranks[0], *how, known)
    found = [[one.trace] for one in first]
    for rank in ranks[1:]:
        traces = _following(runs, rank, first, *how)
        if traces is None:
            traces = [one.trace for one in _run(runs, rank, *how, known)]
        for mine, trace in zip(found, traces):
            mine.append(trace)
    return found


def _run(
    runs: Sequence[RunConfig],
    rank: int,
    decisions: Decisions,
    kernels: bool,
    backend: Backend,
    training: bool,
    known: KnownStages | None,
) -> list[Played]:
    """Runs a rank, once for all runs if the passes of the first are those of the others."""
    run, *others = runs
    also = others[0] if others else None
    how = decisions, True, kernels, backend, training
    found = play(run, rank, *how, also=also, known=known)
    if also is None:
        return [found]
    fewer = found.fewer or play(also, rank, *how, known=known)
    return [found, fewer]


def _following(
    runs: Sequence[RunConfig],
    rank: int,
    first: Sequence[Played],
    decisions: Decisions,
    kernels: bool,
    backend: Backend,
    training: bool,
) -> list[Trace] | None:
    """Returns the traces of a rank that follow from those of another one, if they do."""
    run = runs[0]
    with on_devices(run, rank, kernels, backend) as log:
        axes = build_axes(run.layout, log.device.type, decisions.block)
        split_heads(run.model, run.layout, axes)  # in the order in which a model's building does
        with watched_fakes(log) as watch:
            model = copy.copy(model_outline(run.model))
            model.stages = stages_of(run.model, run.layout.n_stages, decisions.choices.work)
            model.compute_dtype = getattr(torch, run.train.dtype)
            executor = Executor(model, run.layout, axes, GradientSums([], []))
            executor.has_loaded()
            found: list[Trace] = []
            passes: dict[int, tuple[Event, ...]] = {}
            for one, like in zip(runs, first):
                if found:
                    log.trace = replace(log.trace, events=[], complete=False)
                trace = _follows(one, like, executor, axes, log, watch, training, passes)
                if trace is None:
                    return None
                found.append(trace)
    return found


def _follows(
    run: RunConfig,
    first: Played,
    executor: Executor,
    axes: Axes,
    log: Log,
    watch: Watch,
    training: bool,
    passes: dict[int, tuple[Event, ...]],
) -> Trace | None:
    """Returns the trace of the log's rank that follows from that of another one, if it does.

    Args:
        run: The run.
        first: The other rank.
        executor, axes: Those of the log's rank.
        log, watch: The log and its watch.
        training: See `trace_rank`.
        passes: Events of passes in the groups of the log's rank, by the id of those of the other
            rank. It is filled here, for the same passes of the next run.
    """
    if first.repeats is None or not first.trace.complete:
        return None
    events, (start, stop) = first.trace.events, first.repeats.span
    inside = [event for one in first.repeats.recorded.values() for event in one.events]
    translated = translation(first.trace, log.trace, [*events[:start], *inside, *events[stop:]])
    if translated is None:
        return None
    recorded = {}
    for kind, one in first.repeats.recorded.items():
        if id(one.events) not in passes:
            passes[id(one.events)] = translated(one.events)
        theirs = zip(one.left, translated([*one.left.values()]))
        left = {number: start for number, start in theirs if isinstance(start, Start)}
        recorded[kind] = replace(one, events=passes[id(one.events)], left=left)
    layout = executor.layout = run.layout
    stamps = first.repeats.stamps
    repeats = Repeats(
        executor.model, executor, log, watch.count, recorded, stamps=stamps, training=training
    )
    if repeats.missing:
        return None
    n_rows = run.train.global_batch // (layout.dp * layout.micro_batches * axes.batch.size)
    rows = slice(0, n_rows)
    batch = {key: x.to(log.device) for key, x in rows_like(run, rows).items()}
    work = [MicroBatch(rows, batch)] * layout.micro_batches

    def finish(hidden: Tensor, batch: Batch) -> Tensor:
        raise AssertionError("no pass is run")

    if log.kernels:  # those of a step alone
        log.trace.events.clear()
    repeats.repeat(translated(events[:start]))
    if training:
        executor.train(work, finish)
        log.trace.update = len(log.trace.events)
    else:
        executor.evaluate(work, finish)
    repeats.also_numbered(events[start:stop], events[stop:])
    repeats.repeat(translated(events[stop:]))
    repeats.undo()
    log.trace.reads, log.trace.troubles = first.trace.reads, first.trace.troubles
    log.trace.complete = True
    return log.trace
