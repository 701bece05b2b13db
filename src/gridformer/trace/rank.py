"""Traces ranks: the messages and kernels of a step, composed from the record of a short one.

Ranks of a pipeline whose stages have equal layers differ only in the order of their passes and in
their groups. So one of them is recorded, and its passes are put in the order of each.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import count
from typing import NamedTuple, cast

import torch

from gridformer.config import RunConfig
from gridformer.parallel.auto.decisions import Decisions, decide_run
from gridformer.parallel.axes import build_axes, mesh_ranks, split_heads
from gridformer.parallel.data.gradients import GradientSums
from gridformer.parallel.pipeline import Executor, stages_of
from gridformer.parallel.pipeline.partition import model_outline
from gridformer.trace.device import Backend
from gridformer.trace.events import Event, Passed, SingleEvent, Start, Trace, Wait
from gridformer.trace.itineraries import RankSchedule, alike_chunks, in_order, shortened
from gridformer.trace.step import StepPart, on_devices, record_step

_PASSES = ("forward", "backward")
_FEW = 3  # micro-batches without a pipeline, of which the second stands for all in the middle


def trace_rank(
    run: RunConfig,
    rank: int,
    decisions: Decisions | None = None,
    repeat: bool = False,
    kernels: bool = False,
    backend: Backend = "nccl",
    training: bool = True,
) -> Trace:
    """Traces one step of one rank, as it would run on GPUs over NCCL.

    It registers a device type in this process, so call it in a process of its own (see
    `trace_ranks`), which must not belong to a process group.

    Args:
        run: The checked run.
        rank: The rank.
        decisions: The result of `decide_run(run)`; None calls it.
        repeat: Whether equal micro-batches are recorded once and repeated.
        kernels: Whether kernels and read-backs are among the events, too.
        backend: `gloo` traces the step as it would run on CPUs over gloo.
        training: Whether it is an optimizer step; otherwise an evaluation of one global batch.

    Returns:
        The trace. An error of the code is its last trouble, and the trace ends with it.
    """
    decisions = decisions or decide_run(run)
    if repeat:
        return trace_runs([run], [rank], decisions, kernels, backend, training)[0][0]
    how = backend, training, kernels
    return record_step(run, rank, decisions, *how, storages=False).trace


def trace_runs(
    runs: Sequence[RunConfig],
    ranks: Sequence[int],
    decisions: Decisions,
    kernels: bool = False,
    backend: Backend = "nccl",
    training: bool = True,
) -> list[list[Trace]]:
    """Traces ranks that differ only in their place along pp, and whose stages have equal layers.

    Args:
        runs: The run, and others that differ in the number of their micro-batches only.
        ranks: The ranks. The first is recorded, and one of those with passes that it does not have.
        decisions: The result of `decide_run(run)`.
        kernels, backend, training: See `trace_rank`.

    Returns:
        The traces of each run.
    """
    found: dict[int, list[Trace]] = {}
    while left := [rank for rank in ranks if rank not in found]:
        found |= _alike(runs, left, decisions, kernels, backend, training)
    return [[*traces] for traces in zip(*(found[rank] for rank in ranks))]


def _alike(
    runs: Sequence[RunConfig],
    ranks: Sequence[int],
    decisions: Decisions,
    kernels: bool,
    backend: Backend,
    training: bool,
) -> dict[int, list[Trace]]:
    """Traces the first rank, and others that follow from its record; see `trace_runs`."""
    run, pp, rank = runs[0], runs[0].layout.pp, ranks[0]
    stages = mesh_ranks(run.layout, decisions.block).flatten(1).tolist()
    storages = complete = False
    how = decisions, backend, training, kernels, storages, complete
    orders: list[list[list[int] | None]]
    if pp == 1:
        few = sorted({0, min(1, run.layout.micro_batches - 1), run.layout.micro_batches - 1})
        record = record_step(run, rank, *how, follows=few)
        orders = [[_repeated(record.parts, one.layout.micro_batches) for one in runs]]
    else:
        place = {one: number for number, stage in enumerate(stages) for one in stage}
        places = [place[one] for one in ranks for _ in runs]
        alike = alike_chunks(run, decisions, places[0])
        short = shortened([one.layout for _ in ranks for one in runs], places, training, alike)
        record = record_step(run, rank, *how, follows=short.itinerary)
        schedules = iter(short.schedules)
        orders = [[_of(record.parts, next(schedules), pp, alike) for _ in runs] for _ in ranks]
    if not record.parts:
        return {rank: [record.trace] * len(runs)}
    composer = _Composer(record.parts, kernels)
    found: dict[int, list[Trace]] = {}
    for one, mine in zip(ranks, orders):
        if None in mine:
            continue
        trace = record.trace if one == rank else _groups_of(run, one, decisions, backend)
        if not composer.goes_to(record.trace, trace, stages):
            continue
        own = replace(record.trace, rank=one, groups=trace.groups, own=trace.own)
        traces = [composer.trace(order) for order in mine if order is not None]
        found[one] = [replace(own, events=events, update=update) for events, update in traces]
    return found


def _of(
    parts: Sequence[StepPart], schedule: RankSchedule | None, pp: int, alike: Sequence[int]
) -> list[int] | None:
    return None if schedule is None or not parts else in_order(parts, schedule, pp, alike)


def _repeated(parts: Sequence[StepPart], m: int) -> list[int]:
    """Returns the numbers of the parts of a step with m micro-batches and no pipeline."""
    passes = [i for i, part in enumerate(parts) if part.kind in _PASSES]
    each = len(passes) // _FEW  # those of a micro-batch
    order = [*range(len(parts))]
    if m > _FEW:
        order[passes[2 * each] : passes[2 * each]] = passes[each : 2 * each] * (m - _FEW)
    return order


def _groups_of(run: RunConfig, rank: int, decisions: Decisions, backend: Backend) -> Trace:
    """Returns a trace of a rank that has only its groups."""
    with on_devices(run, rank, backend=backend) as log:
        axes = build_axes(run.layout, log.device.type, decisions.block)
        split_heads(run.model, run.layout, axes)  # in the order in which a model's building does
        model = copy.copy(model_outline(run.model))
        model.stages = stages_of(run.model, run.layout.n_stages, decisions.choices.work)
        model.compute_dtype = getattr(torch, run.train.dtype)
        Executor(model, run.layout, axes, GradientSums([], []))
    return log.trace


class _Message(NamedTuple):
    """A start of a message, or a wait for one.

    Attributes:
        starts: Whether it is a start.
        number: The number of the message in the record.
        like: What is equal for messages that are waited for in the order of their starts.
        nth: For a wait: how many of these have been started before the message and are still
            waited for.
    """

    starts: bool
    number: int
    like: Hashable
    nth: int


class _Composer:
    """Puts the parts of a short step together to longer ones, with numbers for their messages.

    Args:
        parts: The parts of the short step.
        kernels: Whether a pass that occurs more than once is one event.
    """

    def __init__(self, parts: Sequence[StepPart], kernels: bool) -> None:
        self._kinds = [part.kind for part in parts]
        self._kernels = kernels
        self._recorded = [cast("tuple[SingleEvent, ...]", part.events) for part in parts]
        self._events = self._recorded
        self._messages = _messages_of(parts)

    def goes_to(self, one: Trace, other: Trace, stages: Sequence[Sequence[int]]) -> bool:
        """Puts the parts into the groups of another rank; returns whether that has them all.

        Args:
            one: A trace of the rank that was recorded.
            other: A trace of the other rank.
            stages: The ranks of each stage.
        """
        self._events = self._recorded
        if one is other:
            return True
        place = {rank: (i, j) for i, stage in enumerate(stages) for j, rank in enumerate(stage)}
        step = place[other.rank][0] - place[one.rank][0]
        there = {rank: stages[(i + step) % len(stages)][j] for rank, (i, j) in place.items()}
        theirs = {(member.purpose, frozenset(member.ranks)): member for member in other.own}
        groups = {
            member.name: theirs.get((member.purpose, frozenset(there[r] for r in member.ranks)))
            for member in one.own
        }

        def moved(event: SingleEvent) -> SingleEvent:
            if not isinstance(event, Start):
                return event
            group = groups[event.group]
            assert group is not None
            parts = tuple(part._replace(peer=there[part.peer]) for part in event.parts)
            return event._replace(group=group.name, ranks=group.ranks, parts=parts)

        every = (event for events in self._recorded for event in events)
        if any(isinstance(event, Start) and groups[event.group] is None for event in every):
            return False
        self._events = [tuple(moved(event) for event in events) for events in self._recorded]
        return True

    def trace(self, order: Sequence[int]) -> tuple[list[Event], int]:
        """Returns the events of the parts in an order, and where the update begins."""
        numbers = count(1)
        left: dict[Hashable, deque[int]] = defaultdict(deque)
        found: list[Event] = []
        update, times = 0, Counter(order)
        for number in order:
            if self._kinds[number] == "add up gradients":
                update = len(found)
            given: dict[int, int] = {}
            for starts, own, like, nth in self._messages[number]:
                if starts:
                    given[own] = next(numbers)
                    left[like].append(given[own])
                else:
                    given[own] = left[like][nth]
                    del left[like][nth]
            events = self._events[number]
            if self._kernels and self._kinds[number] in _PASSES and times[number] > 1:
                found.append(Passed(events, given))
            else:
                found += Passed(events, given).unfolded()
        return found, update


def _messages_of(parts: Sequence[StepPart]) -> list[list[_Message]]:
    """Returns the starts and waits of each part."""
    found = []
    left: dict[Hashable, list[int]] = defaultdict(list)
    likes: dict[int, Hashable] = {}
    like: Hashable
    for part in parts:
        mine = []
        for event in part.events:
            if isinstance(event, Start):
                like = event[1:4] + event[5:]  # all but its number and where it happens
                likes[event.number] = like
                left[like].append(event.number)
                mine.append(_Message(True, event.number, like, 0))
            elif isinstance(event, Wait):
                like = likes[event.number]
                nth = left[like].index(event.number)
                del left[like][nth]
                mine.append(_Message(False, event.number, like, nth))
        found.append(mine)
    return found
