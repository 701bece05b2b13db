"""The order of a rank's passes in a pipeline, from a shorter one with the same kinds of passes.

What a pass records depends on its kind, on its stage, and on what the schedule does around it:
which receives are posted, and which pass came before. A pipeline with fewer ranks and fewer
micro-batches has all these kinds of passes. So a rank runs such a schedule, and each pass of its
own schedule is the first of its kind there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gridformer.config import LayoutConfig, RunConfig
from gridformer.parallel.auto.decisions import Decisions
from gridformer.parallel.pipeline.partition import model_outline, stages_of
from gridformer.parallel.pipeline.schedules import (
    Action,
    Itinerary,
    actions_of,
    forwards,
    rounds,
)
from gridformer.parallel.pipeline.stages import inputs_of
from gridformer.record.step import StepPart

_MOST_RANKS, _MOST_ROUNDS = 8, 3
_TRIES = 8  # schedules that are compared by how many others they stand for
Like = tuple[str, int]  # the kind of a pass, and the number of its stage on its rank


class Pass(NamedTuple):
    """A pass of a rank's own schedule.

    Attributes:
        number: The number of the pass of the shorter schedule that stands for it.
        over: The sends that end before it: for each, whether a forward or a backward pass made it,
            and the number of its stage on the rank.
    """

    number: int
    over: tuple[Like, ...]


class RankSchedule(NamedTuple):
    """The passes of a schedule, and the sends that end after the last of them."""

    passes: list[Pass]
    ends: tuple[Like, ...]


@dataclass(frozen=True)
class ShortSchedule:
    """A shorter schedule of a rank, and longer ones as lists of passes of it.

    Attributes:
        itinerary: The shorter schedule.
        schedules: For each of the longer ones its passes, and the sends that end after the last;
            None for one with passes that the shorter schedule does not have.
    """

    itinerary: Itinerary
    schedules: list[RankSchedule | None]


def shortened(
    layout: LayoutConfig,
    indices: Sequence[int],
    training: bool = True,
    alike: Sequence[int] = (),
) -> ShortSchedule:
    """Returns a short schedule that has all kinds of passes of a rank, and those of other ranks.

    Args:
        layout: The layout.
        indices: The indices along pp of ranks. The first is that of the schedule's rank.
        training: Whether there are backward passes.
        alike: See `alike_chunks`; without it no stage of a rank is like another one.
    """
    wholes = [
        itinerary_of(layout, layout.pp, index, layout.micro_batches, training) for index in indices
    ]
    index = indices[0]
    alike = alike or range(layout.stages_per_rank)
    found = [kinds_of(whole, layout.pp, alike) for whole in wholes]
    wanted = [{*kinds} | _sends_in(over, ends) for kinds, over, ends in found]
    short, (best, _, _) = wholes[0], found[0]
    most, tries = 0, _TRIES
    for pp, here, few in _candidates(layout, index):
        other = itinerary_of(layout, pp, here, few, training)
        kinds, over, ends = kinds_of(other, pp, alike)
        there = {*kinds} | _sends_in(over, ends)
        if not wanted[0] <= there:
            continue
        covered = sum(one <= there for one in wanted)
        if covered > most:
            short, best, most = _moved(other, pp, here, layout.pp, index), kinds, covered
        tries -= 1
        if covered == len(wanted) or not tries:
            break
    first: dict[Hashable, int] = {}
    for number, kind in enumerate(best):
        first.setdefault(kind, number)
    schedules = [
        RankSchedule([Pass(first[kind], before) for kind, before in zip(kinds, over)], ends)
        if {*kinds} <= {*first}
        else None
        for kinds, over, ends in found
    ]
    return ShortSchedule(short, schedules)


def _sends_in(over: Sequence[tuple[Like, ...]], ends: tuple[Like, ...]) -> set[Hashable]:
    return {one for some in (*over, ends) for one in some}


def itinerary_of(
    layout: LayoutConfig, pp: int, index: int, m: int, training: bool = True
) -> Itinerary:
    """Returns the schedule of a rank in a pipeline of so many ranks and micro-batches."""
    k = layout.stages_per_rank
    orders = actions_of(layout.pipeline_order, pp, k, m)
    return Itinerary.of(orders if training else forwards(orders), index, k * pp)


def _candidates(layout: LayoutConfig, index: int) -> Iterator[tuple[int, int, int]]:
    """Yields (ranks, index of the rank, micro-batches) of shorter pipelines, the shortest first."""
    k, found = layout.stages_per_rank, []
    # The two neighbors of a rank in a ring of two are the same rank.
    least = min(layout.pp, 3) if k > 1 else 2
    for pp in range(least, min(layout.pp, _MOST_RANKS) + 1):
        middle = range(1, pp - 1)
        places = [0] if index == 0 else [pp - 1] if index == layout.pp - 1 else [*middle]
        for m in range(1, min(layout.micro_batches, (_MOST_ROUNDS + 1) * pp) + 1):
            if k == 1 or m % rounds(pp, m) == 0:
                found += [(m, pp, here) for here in places]
    for m, pp, here in sorted(found):
        if (m, pp) != (layout.micro_batches, layout.pp):
            yield pp, here, m


def alike_chunks(run: RunConfig, decisions: Decisions, index: int) -> list[int]:
    """Returns for each stage of a rank the number of the first one on the rank that does the same.

    Args:
        run: The run.
        decisions: The result of `decide_run`.
        index: The index of the rank along pp.
    """
    layout = run.layout
    stages = stages_of(run.model, layout.n_stages, decisions.choices.work)
    links = model_outline(run.model).links()
    names = [link.name.rstrip("0123456789") for link in links]
    held = [
        (
            tuple(names[i] for i in stage),
            *(tuple(inputs_of(links, at)) for at in (stage.start, stage.stop)),
            stage.start == 0,
        )
        for stage in stages[index :: layout.pp]
    ]
    return [held.index(one) for one in held]


def kinds_of(
    itinerary: Itinerary, pp: int, alike: Sequence[int]
) -> tuple[list[Hashable], list[tuple[Like, ...]], tuple[Like, ...]]:
    """Returns the kind of each pass of a rank, and the sends that end before it or after all.

    Args:
        itinerary: The schedule of the rank.
        pp: The ranks of its pipeline.
        alike: See `alike_chunks`.
    """
    queues = {peer: deque(coming) for peer, coming in itinerary.arrivals.items()}
    sender = {action: peer for peer, coming in itinerary.arrivals.items() for action in coming}
    last = {(a.kind, a.stage): a for a in itinerary.actions}
    posted: set[Action] = set()
    sent: dict[Action, Like] = {}
    seen: set[tuple[str, int]] = set()
    micros: set[int] = set()
    before: Like | None = None

    def like(action: Action) -> Like:
        return action.kind, alike[action.stage // pp]

    def post(peer: int) -> Like | None:
        if not queues[peer]:
            return None
        action = queues[peer].popleft()
        posted.add(action)
        return like(action)

    begun: Hashable = tuple(post(peer) for peer in queues)
    kinds: list[Hashable] = []
    over: list[tuple[Like, ...]] = []
    for action in itinerary.actions:
        posts, peer = [], sender.get(action)
        if peer is not None:
            while action not in posted:
                posts.append(post(peer))
            posts.append(post(peer))
        taken = itinerary.taken.get(action, ())
        over.append(tuple(sent.pop(one) for one in taken if one in sent))
        me = like(action)
        ends = last[action.kind, action.stage] == action
        pass_of = action.kind, action.stage
        fresh = action.micro not in micros  # counters of dropout are copied to the device
        kinds.append((me, pass_of in seen, fresh, ends, before, tuple(posts), begun))
        if action in itinerary.sends:
            sent[itinerary.sends[action][0]] = me
        seen.add(pass_of)
        micros.add(action.micro)
        before, begun = me, None
    return kinds, over, tuple(sent.values())


def _moved(itinerary: Itinerary, pp: int, index: int, new_pp: int, new_index: int) -> Itinerary:
    """Returns a rank's schedule as that of a rank in a pipeline with more ranks."""

    def rank(peer: int) -> int:
        step = peer - index if pp == 2 else 1 if peer == (index + 1) % pp else -1
        return (new_index + step) % new_pp

    def moved(one: Action) -> Action:
        # It is a pass of this rank, or one that reads what this rank sends.
        there = 0 if one.stage % pp == index else 1 if one.kind == "forward" else -1
        mine = (one.stage - there) // pp * new_pp + new_index
        return one._replace(stage=mine + there)

    def all_moved(some: Iterable[Action]) -> tuple[Action, ...]:
        return tuple(moved(one) for one in some)

    return Itinerary(
        all_moved(itinerary.actions),
        {moved(a): (moved(b), rank(peer)) for a, (b, peer) in itinerary.sends.items()},
        {rank(peer): all_moved(some) for peer, some in itinerary.arrivals.items()},
        {moved(a): all_moved(some) for a, some in itinerary.taken.items()},
    )


def in_order(
    parts: Sequence[StepPart], schedule: RankSchedule, pp: int, alike: Sequence[int]
) -> list[tuple[int, ...]]:
    """Puts the parts of a short step in the order of a rank's own schedule.

    Args:
        parts: The parts of the short step.
        schedule: The rank's own schedule.
        pp: The ranks along pp.
        alike: See `alike_chunks`.

    Returns:
        The numbers of the parts: of each pass, with what it receives and sends, and of each other
        part.
    """
    before: list[int] = []  # what a pass begins with
    recorded: list[tuple[list[int], list[int]]] = []  # until the end of each pass, and behind it
    sends: dict[Like, int] = {}
    found: list[tuple[int, ...]] = []
    rest: list[int] = []
    for number, (kind, stage, *_) in enumerate(parts):
        if kind in ("start", "read the batch"):
            found.append((number,))
        elif kind in ("forward", "backward"):
            recorded.append(([*before, number], []))
            before = []
        elif kind == "send":
            recorded[-1][1].append(number)
        elif kind == "recv":
            before.append(number)
        elif kind.endswith(" sent"):  # by the stage before the one that reads it
            sender = kind.removesuffix(" sent")
            stage = stage - 1 if sender == "forward" else stage + 1
            sends.setdefault((sender, alike[stage // pp]), number)
        else:
            rest.append(number)
    for number, over in schedule.passes:
        (*received, own), after = recorded[number]
        sent = (sends[one] for one in over if one in sends)
        found.append((*received, *sent, own, *after))
    rest[:0] = [sends[one] for one in schedule.ends if one in sends]
    return [*found, *((number,) for number in rest)]
