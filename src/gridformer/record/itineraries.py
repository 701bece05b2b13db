"""The order of the parts of a rank's step in a pipeline, from a shorter schedule with all of them.

What a part records follows from its key: a pass from its stage, and from whether it is the first or
the last one there; a message from the stage and from the messages that wait beside it. A pipeline
with fewer ranks and fewer micro-batches has parts with all these keys. So a rank runs such a
schedule, and each part of its own schedule is the one with its key there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from gridformer.config import LayoutConfig, RunConfig
from gridformer.parallel.auto.decisions import Decisions
from gridformer.parallel.pipeline.partition import model_outline, stages_of
from gridformer.parallel.pipeline.schedules import Action, Itinerary, actions_of, forwards, rounds
from gridformer.parallel.pipeline.stages import inputs_of
from gridformer.record.step import MESSAGES, StepPart

_MOST_RANKS, _MOST_ROUNDS = 8, 3
_TRIES = 8  # schedules that are compared by how many others they stand for
# The kind of a part, and what else decides what it records. Parts that occur together, such as a
# pass with what it receives and sends, are one tuple of keys.
PartKey = tuple[Hashable, ...]
PartKeys = list[tuple[PartKey, ...]]


class ShortSchedule(NamedTuple):
    """A shorter schedule of a rank, and longer ones that consist of parts of it.

    Attributes:
        itinerary: The shorter schedule.
        keys: The keys of its parts.
        schedules: For each of the longer ones the keys of its parts; None for one with keys that
            the shorter schedule does not have.
    """

    itinerary: Itinerary
    keys: PartKeys
    schedules: list[PartKeys | None]


def shortened(
    layout: LayoutConfig,
    indices: Sequence[int],
    training: bool = True,
    alike: Sequence[int] = (),
) -> ShortSchedule:
    """Returns a short schedule that has all kinds of parts of a rank, and those of other ranks.

    Args:
        layout: The layout.
        indices: The indices along pp of ranks. The first is that of the schedule's rank.
        training: Whether there are backward passes.
        alike: For each stage of a rank the first one that does the same;
            without it no stage of a rank is like another one.
    """
    m, index = layout.micro_batches, indices[0]
    alike = alike or range(layout.stages_per_rank)
    wholes = [itinerary_of(layout, layout.pp, index, m, training) for index in indices]
    schedules = [keys_of(whole, layout.pp, alike) for whole in wholes]
    wanted = [_set_of(keys) for keys in schedules]
    short, best, most, tries = wholes[0], schedules[0], 0, _TRIES
    for pp, here, few in _candidates(layout, index):
        other = itinerary_of(layout, pp, here, few, training)
        keys = keys_of(other, pp, alike)
        there = _set_of(keys)
        if not wanted[0] <= there:
            continue
        covered = sum(one <= there for one in wanted)
        if covered > most:
            short, best, most = _moved(other, pp, here, layout.pp, index), keys, covered
        tries -= 1
        if covered == len(wanted) or not tries:
            break
    there = _set_of(best)
    return ShortSchedule(
        short, best, [keys if one <= there else None for keys, one in zip(schedules, wanted)]
    )


def _set_of(keys: PartKeys) -> set[PartKey]:
    return {key for group in {*keys} for key in group}


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


def stages_held(run: RunConfig, decisions: Decisions) -> list[list[Hashable]]:
    """Returns what each rank of a pipeline holds, equal for stages that do the same.

    They have equal layers and equal inputs, and so have the stages after them.

    Returns:
        For each place along pp a list with an entry for each stage there.
    """
    layout = run.layout
    stages = stages_of(run.model, layout.n_stages, decisions.choices.work)
    links = model_outline(run.model).links()
    names = [link.name.rstrip("0123456789") for link in links]
    held: list[Hashable] = [
        (
            tuple(names[i] for i in stage),
            *(tuple(inputs_of(links, at)) for at in (stage.start, stage.stop)),
            stage.start == 0,
        )
        for stage in stages
    ]
    return [held[place :: layout.pp] for place in range(layout.pp)]


def alike_stages(run: RunConfig, decisions: Decisions) -> list[list[int]]:
    """Returns the places along pp, in one list for all places whose stages do the same."""
    if run.layout.pp == 1:
        return [[0]]
    found: dict[Hashable, list[int]] = {}
    for place, held in enumerate(stages_held(run, decisions)):
        found.setdefault(tuple(held), []).append(place)
    return [*found.values()]


def keys_of(itinerary: Itinerary, pp: int, alike: Sequence[int]) -> PartKeys:
    """Returns the keys of the parts of a rank's step, in order.

    Args:
        itinerary: The schedule of the rank.
        pp: The ranks of its pipeline.
        alike: See `shortened`.
    """
    queues = {peer: deque(coming) for peer, coming in itinerary.arrivals.items()}
    sender = {action: peer for peer, coming in itinerary.arrivals.items() for action in coming}
    last = {a.stage: a for a in itinerary.actions if a.kind == "backward"}
    posted: dict[int, list[Action]] = {peer: [] for peer in queues}
    sent: dict[int, list[Action]] = {}
    sent_by: dict[Action, tuple[int, int]] = {}  # the other rank, and the stage
    seen: set[tuple[str, int]] = set()
    micros: set[int] = set()
    ended = 0
    found: PartKeys = []

    def like(stage: int) -> int:
        return alike[stage // pp]

    def post(peer: int, first: bool = False) -> Iterator[PartKey]:
        if queues[peer]:
            action = queues[peer].popleft()
            posted[peer].append(action)
            yield f"{action.kind} posted", like(action.stage), first

    def end(message: Action) -> Iterator[PartKey]:
        if message in sent_by:
            peer, stage = sent_by.pop(message)
            nth = sent[peer].index(message)
            del sent[peer][nth]
            yield f"{message.kind} sent", like(stage), nth

    for peer in queues:
        found += [(key,) for key in post(peer, not found)]  # the first one has what comes before it
    for action in itinerary.actions:
        kind, stage, micro = action
        group: list[PartKey] = []
        if (peer := sender.get(action, -1)) >= 0:
            while action not in posted[peer]:
                group += post(peer)
            group += post(peer)
            nth = posted[peer].index(action)
            del posted[peer][nth]
            group.append(("recv", kind, like(stage), nth))
            for message in itinerary.taken[action]:
                group += end(message)
        ends, again = last.get(stage) == action, (kind, stage) in seen
        # The first pass of a stage adds to gradients that an earlier stage shares with it.
        begun = -1 if again else sum(kind == other for other, _ in seen)
        fresh = micro not in micros  # stamps of dropout are copied to the device
        group.append((kind, like(stage), begun, ends, fresh, not micros, ended))
        ended += ends  # sums that a stage has begun end in passes of other stages
        if action in itinerary.sends:
            message, peer = itinerary.sends[action]
            sent.setdefault(peer, []).append(message)
            sent_by[message] = peer, stage
            group.append(("send", kind, like(stage)))
        seen.add((kind, stage))
        micros.add(micro)
        found.append(tuple(group))
    return found + [(key,) for message in [*sent_by] for key in end(message)]


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
    parts: Sequence[StepPart], short: PartKeys, schedule: PartKeys
) -> list[tuple[int, ...]]:
    """Puts the parts of a short step in the order of a rank's own schedule.

    Args:
        parts: The parts of the short step.
        short: The keys of its passes and messages.
        schedule: Those of the rank's own schedule.

    Returns:
        The numbers of the parts; those that occur together are one tuple.
    """
    places = [i for i, part in enumerate(parts) if part.kind in ("forward", "backward", *MESSAGES)]
    kinds = {parts[i].kind for i in places}  # a rank without activations exchanges no messages
    numbers: dict[PartKey, int] = {}
    mine = (key for group in short for key in group if key[0] in kinds)
    for key, number in zip(mine, places, strict=True):
        assert parts[number].kind == key[0]
        numbers.setdefault(key, number)
    known = {group: tuple(numbers[k] for k in group if k[0] in kinds) for group in {*schedule}}
    begin = [(i,) for i in range(places[0])]
    passes = [known[group] for group in schedule if known[group]]
    between = {*range(places[0], len(parts))} - {*places}
    return [*begin, *passes, *((i,) for i in sorted(between))]
