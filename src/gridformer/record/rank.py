"""Records ranks: what they do and hold in a step, composed from the records of short ones.

A short step has few layers (gridformer.record.layers) and few micro-batches
(gridformer.record.itineraries). Ranks of a pipeline whose stages have equal layers differ only in
the order of their passes and in their groups. So one of them is recorded, and its passes are put in
the order of each.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import NamedTuple

from gridformer.config import RunConfig
from gridformer.parallel.auto.decisions import Decisions, decide_run
from gridformer.parallel.axes import mesh_ranks
from gridformer.parallel.pipeline.schedules import Itinerary
from gridformer.record.device import Backend
from gridformer.record.events import (
    Awaited,
    Event,
    Held,
    Passed,
    SingleEvent,
    Start,
    Trace,
    Wait,
)
from gridformer.record.itineraries import ShortSchedule, in_order, shortened
from gridformer.record.layers import (
    Fewer,
    NotPeriodicError,
    removable,
    with_layers,
    without_layers,
)
from gridformer.record.step import PASSES, RecordOptions, StepPart, StepRecord, record_step
from gridformer.utils.process import is_copy, no_garbage_collection, on_all_cores

_FEW = 3  # micro-batches without a pipeline, of which the second stands for all in the middle
_KEPT = (2, 3, 5, 8)  # layers of the shortest stage of the shorter step, until layers repeat


@dataclass(frozen=True)
class RankRecord:
    """What a rank does in a step, and what it holds.

    Attributes:
        trace: Its trace; without events if only memory was asked for.
        step: The record of a step that has the parts of this one.
        order: The numbers of the parts, in order.
    """

    trace: Trace
    step: StepRecord
    order: Sequence[int]


def trace_rank(
    run: RunConfig,
    rank: int,
    decisions: Decisions | None = None,
    kernels: bool = False,
    backend: Backend = "nccl",
    training: bool = True,
) -> Trace:
    """Traces one complete step of one rank, as it would run on GPUs over NCCL.

    It registers a device type in this process, which must not belong to a process group. An error
    of the code is the last trouble of the trace, which ends with it.

    Args:
        run: The checked run.
        rank: The rank.
        decisions: The result of `decide_run(run)`; None calls it.
        kernels, backend, training: See `RecordOptions`.
    """
    how = RecordOptions(backend, kernels, False, training, "complete")
    return record_step(run, rank, decisions or decide_run(run), how).trace


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
    records: list[RankRecord] = []
    left = [_Line(run, line, decisions, how) for line in lines]
    while left:
        work = [partial(line.recorded, n) for line in left for n in line.left_out(_KEPT[0])]
        taken = iter(on_all_cores(_done, work) if beside else _done(work))
        rest = []
        for line in left:
            mine = line.composed({n: next(taken) for n in line.left_out(_KEPT[0])})
            records += mine
            known = {one.trace.rank for one in mine}
            if others := [rank for rank in line.ranks if rank not in known]:
                rest.append(replace(line, ranks=others))
        left, beside = rest, False  # a copy of a process that has computed gradients computes none
    return sorted(records, key=lambda one: one.trace.rank)


def _done(work: Sequence[Callable[[], StepRecord]]) -> list[StepRecord]:
    with no_garbage_collection():
        records = [piece() for piece in work]
    if is_copy() and not all(one.parts for one in records):
        raise RuntimeError("what fails in a copy of a process is done again in the process")
    return records


@dataclass(frozen=True)
class _Line:
    """Ranks that follow from the record of the first one; see `record_ranks`."""

    run: RunConfig
    ranks: Sequence[int]
    decisions: Decisions
    how: RecordOptions

    def left_out(self, kept: int) -> list[Fewer]:
        """Returns how many layers a stage loses in the longest step, and in shorter ones if any.

        Args:
            kept: How many layers the shortest stage of the shorter step keeps; 0 keeps all.
        """
        if self.how.extent == "few layers":
            return [removable(self.run, self.decisions, kept + 1, 0)]
        kept += kept > 0 and self.run.layout.dp_mode == "fsdp"  # shards travel a layer ahead
        fewer = removable(self.run, self.decisions, kept) if kept else Fewer(0, 0)
        if self.how.extent != "composed":
            return [Fewer(0, 0)]
        return [Fewer(*each) for each in product(*((n - 1, n) if n else (0,) for n in fewer))]

    def recorded(self, fewer: Fewer) -> StepRecord:
        """Records the short step of the first rank with so many layers fewer in each stage."""
        if time.monotonic() > self.how.until:
            return StepRecord(Trace(self.ranks[0]))
        follows: Itinerary | list[int] | None = None
        if self.how.extent != "complete":
            # Without a pipeline the first pass makes gradients, the last one begins their sums.
            several, m = self.run.layout.pp > 1, self.run.layout.micro_batches
            follows = self._schedule.itinerary if several else sorted({0, min(1, m - 1), m - 1})
        with without_layers(self.run, self.decisions, fewer) as (part, last):
            # Muon takes matrices of several layers together, so those of all layers.
            more = {} if self.how.extent == "few layers" else dict.fromkeys(last, sum(fewer))
            record = record_step(part, self.ranks[0], self.decisions, self.how, follows, more)
        if record.parts and follows:
            record.trace.events = []
        return record

    def composed(self, records: dict[Fewer, StepRecord]) -> list[RankRecord]:
        """Returns the records of ranks that follow from short steps with so many layers fewer."""
        longer = next(iter(records.values()))
        if not longer.parts:
            traces = (replace(longer.trace, rank=rank) for rank in self.ranks)
            return [RankRecord(trace, longer, []) for trace in traces]
        if self.how.extent == "complete":
            return [RankRecord(longer.trace, longer, range(len(longer.parts)))]
        record = self._with_layers(records)
        composer = _Composer(record, self._stages)
        ranks = []
        for rank, order in zip(self.ranks, self._orders(record.parts)):
            if order is None:
                continue
            if self.how.storages and not self.how.kernels:
                ranks.append(RankRecord(replace(record.trace, rank=rank), record, order))
            elif (trace := composer.trace(rank, order)) is not None:
                ranks.append(RankRecord(trace, record, order))
        return ranks

    def _with_layers(self, records: dict[Fewer, StepRecord]) -> StepRecord:
        """Returns the record of a step with all layers."""
        for kept in _KEPT:
            numbers = self.left_out(kept)
            records |= {n: self.recorded(n) for n in numbers if n not in records}
            if len(numbers) == 1:
                return records[numbers[0]]
            longest = numbers[0]
            with suppress(NotPeriodicError):
                # First all layers that are not recomputed, and then the others.
                full: dict[int, StepRecord] = {}
                for n in {n.recomputed: None for n in numbers}:
                    longer, *shorter = (records[one] for one in numbers if one.recomputed == n)
                    full[n] = longer
                    if shorter:
                        full[n] = with_layers(shorter[0], longer, longest.others)
                longer, *shorter = full.values()
                if not shorter:
                    return longer
                return with_layers(shorter[0], longer, longest.recomputed)
        return self.recorded(Fewer(0, 0))

    @cached_property
    def _stages(self) -> list[list[int]]:
        """The ranks of each place along pp."""
        ranks: list[list[int]] = (
            mesh_ranks(self.run.layout, self.decisions.block).flatten(1).tolist()
        )
        return ranks

    @cached_property
    def _schedule(self) -> ShortSchedule:
        """The short schedule of the first rank."""
        place = {rank: i for i, stage in enumerate(self._stages) for rank in stage}
        places = [place[rank] for rank in self.ranks]
        return shortened(self.run.layout, places, self.how.training)

    def _orders(self, parts: Sequence[StepPart]) -> list[list[int] | None]:
        """Returns the numbers of the parts of each rank; None if it has others."""
        layout = self.run.layout
        if layout.pp > 1:
            _, short, schedules = self._schedule
            return [None if one is None else in_order(parts, short, one) for one in schedules]
        passes = [i for i, part in enumerate(parts) if part.kind in PASSES]
        each = len(passes) // _FEW  # those of a micro-batch
        order: list[int] = [*range(len(parts))]
        if layout.micro_batches > _FEW:
            again = passes[each : 2 * each] * (layout.micro_batches - _FEW)
            order[passes[2 * each] : passes[2 * each]] = again
        return [order]


class _Part(NamedTuple):
    """A part of the steps of a rank.

    Attributes:
        events: See `Passed`.
        n_starts: How many messages it starts.
        crossing: The messages that it starts and does not wait for, or only waits for, in order:
            what is equal for messages that are waited for in turn; for a wait `Awaited.nth`, and -1
            for a start; the number in `events`.
    """

    events: tuple[SingleEvent, ...]
    n_starts: int
    crossing: list[tuple[object, int, int]]


class _Composer:
    """Puts the parts of a short step together to longer ones, with numbers for their messages.

    Args:
        record: The short step.
        stages: The ranks of each place along pp.
    """

    def __init__(self, record: StepRecord, stages: Sequence[Sequence[int]]) -> None:
        self._recorded = record
        self._stages = stages
        self._place = {r: (i, j) for i, stage in enumerate(stages) for j, r in enumerate(stage)}
        self._parts = [[e for e in part.events if not isinstance(e, Held)] for part in record.parts]
        starts = [e for part in self._parts for e in part if isinstance(e, Start)]
        self._used = {start.group for start in starts}
        self._summed = {start.group for start in starts if start.op != "p2p"}
        self._moved: Callable[[Start], Start] = lambda start: start
        self._known: dict[int, _Part] = {}

    def trace(self, rank: int, order: Sequence[int]) -> Trace | None:
        """Returns the trace of a rank whose step has the parts in an order.

        It is None if a group of some stages, such as those that share a parameter, has not this
        rank. Groups get names that tell them apart.
        """
        place, one = self._place, self._recorded.trace
        step = place[rank][0] - place[one.rank][0]

        def there(peer: int) -> int:
            i, j = place[peer]
            return self._stages[(i + step) % len(self._stages)][j]

        groups: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, purpose, ranks in one.own:
            n_stages = len({place[r][0] for r in ranks})
            stays = name in self._summed and 1 < n_stages < len(self._stages)
            ranks = tuple(sorted(ranks if stays else map(there, ranks)))
            if name in self._used and rank not in ranks:
                return None
            groups[name] = f"{purpose} {[*ranks]}", ranks

        def moved(start: Start) -> Start:
            name, ranks = groups[start.group]
            parts = tuple(part._replace(peer=there(part.peer)) for part in start.parts)
            return start._replace(group=name, ranks=ranks, parts=parts)

        self._moved, self._known = moved, {}
        events, update = self._events(order)
        return replace(one, rank=rank, events=events, update=update)

    def _events(self, order: Sequence[int]) -> tuple[list[Event], int]:
        """Returns the events of the parts in an order, and where the update begins."""
        kinds = [part.kind for part in self._recorded.parts]
        left: dict[object, deque[int]] = defaultdict(deque)
        events: list[Event] = []
        begun, update, times = 1, 0, Counter(order)
        for number in order:
            if kinds[number] == "add up gradients":
                update = len(events)
            part = self._known.get(number)
            if part is None:
                part = self._known[number] = self._part(self._parts[number], left)
            others = []
            for like, nth, own in part.crossing:
                if nth < 0:
                    left[like].append(begun + own)
                else:
                    others.append(left[like][nth])
                    del left[like][nth]
            passed = Passed(part.events, begun, others, not part.crossing)
            begun += part.n_starts
            if times[number] > 1:
                events.append(passed)
            else:
                events += passed.unfolded()
        return events, update

    def _part(
        self, events: Sequence[SingleEvent | Awaited], left: Mapping[object, Sequence[int]]
    ) -> _Part:
        """Returns a part; `left` are the messages waited for where it first begins."""
        queues: dict[object, list[int | None]] = {}  # None stands for what was started before
        open_: set[int] = set()  # the messages that it starts and that nothing has waited for
        crossing: list[tuple[object, int, int]] = []
        n_starts = n_others = 0
        numbered: list[SingleEvent] = []
        for event in events:
            if isinstance(event, Start | Awaited):
                queue = queues.setdefault(event.like, [None] * len(left.get(event.like, ())))
            if isinstance(event, Start):
                queue.append(n_starts)
                open_.add(n_starts)
                crossing.append((event.like, -1, n_starts))
                event = self._moved(event).numbered(n_starts)
                n_starts += 1
            elif isinstance(event, Awaited):
                own = queue.pop(event.nth)
                if own is None:
                    n_others += 1
                    own = -n_others
                    crossing.append((event.like, event.nth, own))
                open_.discard(own)
                event = Wait(own, event.place)
            numbered.append(event)
        crosses = [one for one in crossing if one[2] < 0 or one[2] in open_]
        return _Part(tuple(numbered), n_starts, crosses)
