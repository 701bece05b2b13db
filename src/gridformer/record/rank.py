"""Records ranks: what they do and hold in a step, composed from the records of short ones.

A short step has few layers (gridformer.record.layers), and in a pipeline few passes
(gridformer.record.itineraries). Ranks of a pipeline whose stages have equal layers differ only in
the order of their passes and in their groups. So one of them is recorded, and its passes are put in
the order of each.
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal, NamedTuple

import torch

from gridformer.config import RunConfig
from gridformer.parallel.auto.decisions import Decisions, decide_run
from gridformer.parallel.axes import build_axes, mesh_ranks, split_heads
from gridformer.parallel.data.gradients import GradientSums
from gridformer.parallel.pipeline import Executor, stages_of
from gridformer.parallel.pipeline.partition import model_outline
from gridformer.parallel.pipeline.schedules import Itinerary
from gridformer.record.device import Backend
from gridformer.record.events import (
    Awaited,
    Event,
    Held,
    Member,
    Passed,
    SingleEvent,
    Start,
    Trace,
    Wait,
)
from gridformer.record.itineraries import ShortSchedule, in_order, shortened, stages_held
from gridformer.record.layers import NotPeriodicError, removable, with_layers, without_layers
from gridformer.record.step import StepPart, StepRecord, on_devices, record_step
from gridformer.utils.process import is_copy, no_garbage_collection, on_all_cores

_PASSES = ("forward", "backward")
_FEW = 3  # micro-batches without a pipeline, of which the second stands for all in the middle
_KEPT = (2, 3, 5, 8)  # layers of the shortest stage of the shorter step, until layers repeat
Extent = Literal["composed", "few layers", "all layers", "complete"]


class RecordOptions(NamedTuple):
    """What of a step is recorded.

    Attributes:
        backend: `nccl` records what a GPU does, `gloo` what a CPU does.
        kernels: Whether kernels and read-backs are recorded, too.
        storages: Whether memory is recorded.
        training: Whether it is an optimizer step; otherwise an evaluation of one global batch.
        extent: `composed` is the whole step, of which few layers and passes run. With `few layers`
            it has only the layers that run, and with `all layers` all of them run, so that events
            have their names. `complete` runs every pass, too.
        until: The time (`time.monotonic`) after which no step is begun.
    """

    backend: Backend = "nccl"
    kernels: bool = False
    storages: bool = False
    training: bool = True
    extent: Extent = "composed"
    until: float = math.inf


@dataclass(frozen=True)
class RankRecord:
    """What a rank does in a step, and what it holds.

    Attributes:
        trace: Its trace; without events if only memory was asked for.
        step: The record of a step that has the parts of this one.
        order: The numbers of the parts, in order; those that occur together in one tuple.
    """

    trace: Trace
    step: StepRecord
    order: Sequence[tuple[int, ...]]


def trace_rank(
    run: RunConfig,
    rank: int,
    decisions: Decisions | None = None,
    kernels: bool = False,
    backend: Backend = "nccl",
    training: bool = True,
) -> Trace:
    """Traces one complete step of one rank, as it would run on GPUs over NCCL.

    It registers a device type in this process, which must not belong to a process group.

    Args:
        run: The checked run.
        rank: The rank.
        decisions: The result of `decide_run(run)`; None calls it.
        kernels: Whether kernels and read-backs are among the events, too.
        backend: `gloo` traces the step as it would run on CPUs over gloo.
        training: Whether it is an optimizer step; otherwise an evaluation of one global batch.

    Returns:
        The trace. An error of the code is its last trouble, and the trace ends with it.
    """
    decisions = decisions or decide_run(run)
    return record_step(run, rank, decisions, backend, training, kernels, storages=False).trace


def record_ranks(
    run: RunConfig,
    lines: Sequence[Sequence[int]],
    decisions: Decisions,
    how: RecordOptions,
    beside: bool = False,
) -> list[RankRecord]:
    """Records the steps of ranks.

    It registers a device type in this process, which must not belong to a process group.

    Args:
        run: The checked run.
        lines: The ranks. Those of one list differ only in their place along pp, and their stages
            have equal layers. The first is recorded, and one of those with passes that it does not
            have.
        decisions: The result of `decide_run(run)`.
        how: What is recorded.
        beside: Whether copies of this process share the work.

    Returns:
        The records, in the order of ranks. That of a step that fails has no parts, and its trace
        ends with the error; that of a step for which there was no time has no trouble, either.
    """
    found: list[RankRecord] = []
    left = [_Line(run, line, decisions, how) for line in lines]
    while left:
        work = [partial(line.recorded, n) for line in left for n in line.left_out(_KEPT[0])]
        taken = iter(on_all_cores(_done, work) if beside else _done(work))
        rest = []
        for line in left:
            mine = line.composed({n: next(taken) for n in line.left_out(_KEPT[0])})
            found += mine
            known = {one.trace.rank for one in mine}
            if others := [rank for rank in line.ranks if rank not in known]:
                rest.append(replace(line, ranks=others))
        left, beside = rest, False  # a copy of a process that has computed gradients computes none
    return sorted(found, key=lambda one: one.trace.rank)


def _done(work: Sequence[Callable[[], StepRecord]]) -> list[StepRecord]:
    with no_garbage_collection():
        found = [piece() for piece in work]
    if is_copy() and not all(one.parts for one in found):
        raise RuntimeError("what fails in a copy of a process is done again in the process")
    return found


@dataclass(frozen=True)
class _Line:
    """Ranks that follow from the record of the first one; see `record_ranks`."""

    run: RunConfig
    ranks: Sequence[int]
    decisions: Decisions
    how: RecordOptions

    def left_out(self, kept: int) -> list[int]:
        """Returns how many layers a stage loses in the longer step, and in the shorter one if any.

        Args:
            kept: How many layers the shortest stage of the shorter step keeps; 0 keeps all.
        """
        if self.how.extent == "few layers":
            return [removable(self.run, self.decisions, kept + 1, 0)]
        n = removable(self.run, self.decisions, kept) if kept else 0
        return [n - 1, n] if n and self.how.extent == "composed" else [0]

    def composed(self, records: dict[int, StepRecord]) -> list[RankRecord]:
        """Returns the records of ranks that follow from those of short steps.

        Args:
            records: The short steps, by how many layers a stage loses.
        """
        longer = next(iter(records.values()))
        if not longer.parts:
            trace = longer.trace
            return [RankRecord(replace(trace, rank=rank), longer, []) for rank in self.ranks]
        if self.how.extent == "complete":
            return [RankRecord(longer.trace, longer, [tuple(range(len(longer.parts)))])]
        record = self._with_layers(records)
        stages = mesh_ranks(self.run.layout, self.decisions.block).flatten(1).tolist()
        composer = _Composer(record.parts, stages)
        found = []
        for rank, order in zip(self.ranks, self._orders(record.parts)):
            if order is None:
                continue
            if self.how.storages and not self.how.kernels:
                found.append(RankRecord(replace(record.trace, rank=rank), record, order))
                continue
            trace = record.trace
            known = self.how.kernels and not composer.some_stages()
            if rank != trace.rank and not known:
                trace = _groups_of(self.run, rank, self.decisions, self.how.backend)
            own = None if known else trace.own
            if composer.goes_to(record.trace, rank, own):
                events, update = composer.trace(order)
                trace = replace(
                    record.trace,
                    rank=rank,
                    groups=trace.groups,
                    own=trace.own,
                    events=events,
                    update=update,
                )
                found.append(RankRecord(trace, record, order))
        return found

    def _with_layers(self, records: dict[int, StepRecord]) -> StepRecord:
        """Returns the record of a step with all layers."""
        for kept in _KEPT:
            numbers = self.left_out(kept)
            records |= {n: self.recorded(n) for n in numbers if n not in records}
            longer, *shorter = (records[n] for n in numbers)
            if not shorter:
                return longer
            with suppress(NotPeriodicError):
                return with_layers(shorter[0], longer, numbers[0])
        return self.recorded(0)

    @cached_property
    def _schedule(self) -> ShortSchedule:
        """The short schedule of the rank."""
        stages = mesh_ranks(self.run.layout, self.decisions.block).flatten(1).tolist()
        place = {one: number for number, stage in enumerate(stages) for one in stage}
        places = [place[one] for one in self.ranks]
        held = stages_held(self.run, self.decisions)[places[0]]
        alike = [held.index(stage) for stage in held]
        return shortened(self.run.layout, places, self.how.training, alike)

    @property
    def _follows(self) -> Itinerary | list[int]:
        """What the rank runs."""
        m = self.run.layout.micro_batches
        if self.run.layout.pp > 1:
            return self._schedule.itinerary
        # The first makes gradients, and the last one begins their sums.
        return sorted({0, min(1, m - 1), m - 1})

    def recorded(self, fewer: int) -> StepRecord:
        """Records the short step with so many layers fewer in each stage."""
        run, rank = self.run, self.ranks[0]
        backend, kernels, storages, training, extent, until = self.how
        if time.monotonic() > until:
            return StepRecord(Trace(rank))
        complete = extent == "complete"
        with without_layers(run, self.decisions, fewer) as part:
            record = record_step(
                *(part, rank, self.decisions, backend, training, kernels or storages, storages),
                complete=complete,
                follows=None if complete else self._follows,
            )
        if record.parts and not complete:
            record.trace.events = []
        return record

    def _orders(self, parts: Sequence[StepPart]) -> list[list[tuple[int, ...]] | None]:
        """Returns the numbers of the parts of each rank; None if it has others."""
        layout = self.run.layout
        if layout.pp > 1:
            _, short, schedules = self._schedule
            return [None if one is None else in_order(parts, short, one) for one in schedules]
        passes = [i for i, part in enumerate(parts) if part.kind in _PASSES]
        each = len(passes) // _FEW  # those of a micro-batch
        order: list[int] = [*range(len(parts))]
        if layout.micro_batches > _FEW:
            again = passes[each : 2 * each] * (layout.micro_batches - _FEW)
            order[passes[2 * each] : passes[2 * each]] = again
        return [[(number,) for number in order]]


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


class _Crossing(NamedTuple):
    """A message that a group of parts starts and does not wait for, or only waits for.

    Attributes:
        like: What is equal for messages that are waited for in turn.
        nth: For a wait, see `Awaited`; -1 for a start.
        own: For a start, its number within the group.
    """

    like: object
    nth: int
    own: int


class _Group(NamedTuple):
    """Parts of a step that occur together.

    Attributes:
        events: See `Passed`.
        n_starts: How many messages it starts.
        crossing: The messages that it has in common with other groups, in order.
    """

    events: tuple[Event, ...]
    n_starts: int
    crossing: list[_Crossing]


class _Composer:
    """Puts the parts of a short step together to longer ones, with numbers for their messages.

    Args:
        parts: The parts of the short step.
        stages: The ranks of each stage.
    """

    def __init__(self, parts: Sequence[StepPart], stages: Sequence[Sequence[int]]) -> None:
        self._stages = stages
        self._place = {r: (i, j) for i, stage in enumerate(stages) for j, r in enumerate(stage)}
        self._kinds = [part.kind for part in parts]
        self._recorded = [[e for e in part.events if not isinstance(e, Held)] for part in parts]
        self._moved: Callable[[Start], Start] = lambda start: start
        self._groups: dict[tuple[int, ...], _Group] = {}

    def some_stages(self) -> bool:
        """Whether collectives have groups of some stages, which others may not have."""
        starts = (e for events in self._recorded for e in events if isinstance(e, Start))
        used = {start.ranks for start in starts if start.op != "p2p"}
        return any(
            1 < len({self._place[rank][0] for rank in ranks}) < len(self._stages) for ranks in used
        )

    def goes_to(self, one: Trace, rank: int, own: Sequence[Member] | None) -> bool:
        """Puts the parts into the groups of another rank; returns whether that has them all.

        Groups get names that tell them apart.

        Args:
            one: A trace of the rank that was recorded.
            rank: The other rank.
            own: Its groups; None if it has those of the first one, some stages further.
        """
        step = self._place[rank][0] - self._place[one.rank][0]

        def there(peer: int) -> int:
            i, j = self._place[peer]
            return self._stages[(i + step) % len(self._stages)][j]

        theirs = {(member.purpose, frozenset(member.ranks)): member for member in own or ()}
        groups: dict[str, Member | None] = {}
        for member in one.own:
            purpose = member.purpose
            ranks = tuple(sorted(map(there, member.ranks)))
            found = theirs.get((purpose, frozenset(ranks)))
            if own is None or found is not None:
                found = Member(f"{purpose} {[*ranks]}", purpose, ranks)
            groups[member.name] = found

        def moved(event: Start) -> Start:
            group = groups[event.group]
            assert group is not None
            parts = tuple(part._replace(peer=there(part.peer)) for part in event.parts)
            return event._replace(group=group.name, ranks=group.ranks, parts=parts)

        self._moved = moved
        self._groups = {}
        every = (event for events in self._recorded for event in events)
        return all(groups[event.group] for event in every if isinstance(event, Start))

    def trace(self, order: Sequence[tuple[int, ...]]) -> tuple[list[Event], int]:
        """Returns the events of the parts in an order, and where the update begins."""
        left: dict[object, deque[int]] = defaultdict(deque)
        found: list[Event] = []
        begun, update, times = 1, 0, Counter(order)
        for numbers in order:
            if self._kinds[numbers[0]] == "add up gradients":
                update = len(found)
            group = self._groups.get(numbers)
            if group is None:
                group = self._groups[numbers] = self._group(numbers, left)
            others = []
            for like, nth, own in group.crossing:
                if nth < 0:
                    left[like].append(begun + own)
                else:
                    others.append(left[like][nth])
                    del left[like][nth]
            passed = Passed(group.events, begun, others, not group.crossing)
            begun += group.n_starts
            if times[numbers] > 1:
                found.append(passed)
            else:
                found += passed.unfolded()
        return found, update

    def _group(self, numbers: tuple[int, ...], left: Mapping[object, Sequence[int]]) -> _Group:
        """Returns some parts as a group.

        Args:
            numbers: The numbers of the parts.
            left: The messages that are waited for where it begins for the first time.
        """
        queues: dict[object, list[int | None]] = {}  # None stands for what was started before
        likes: list[object] = []  # of the messages that it starts
        open_: set[int] = set()  # those that nothing has waited for
        crossing: list[_Crossing] = []
        n_others = 0
        events: list[Event] = []
        for number in numbers:
            mine: list[SingleEvent] = []
            first, closed = len(likes), True
            for event in self._recorded[number]:
                if isinstance(event, Start | Awaited):
                    queue = queues.setdefault(event.like, [None] * len(left.get(event.like, ())))
                if isinstance(event, Start):
                    own = len(likes)
                    queue.append(own)
                    likes.append(event.like)
                    open_.add(own)
                    crossing.append(_Crossing(event.like, -1, own))
                    mine.append(self._moved(event).numbered(own))
                elif isinstance(event, Awaited):
                    started = queue.pop(event.nth)
                    if started is None:
                        n_others += 1
                        crossing.append(_Crossing(event.like, event.nth, -n_others))
                    else:
                        open_.remove(started)
                    own = -n_others if started is None else started
                    closed &= own >= first
                    mine.append(Wait(own, event.place))
                else:
                    assert not isinstance(event, Held)
                    mine.append(event)
            if closed and mine and len(numbers) > 1 and not any(own >= first for own in open_):
                relative = tuple(
                    event._replace(number=event.number - first)
                    if isinstance(event, Start | Wait)
                    else event
                    for event in mine
                )
                events.append(Passed(relative, first, closed=True))
            else:
                events += mine
        return _Group(
            tuple(events), len(likes), [one for one in crossing if one.own < 0 or one.own in open_]
        )
