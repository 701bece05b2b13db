"""The order of the parts of a rank's step in a pipeline, from a step with few micro-batches.

What a part records follows from its key: a pass from its stage, and from whether it is the first or
the last one there; a message from the stage and from the messages that wait beside it. A rank's
schedule with few of its micro-batches has parts with all these keys. So a rank runs such a
schedule, and each part of its own schedule is the one with its key there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from gridformer.config import LayoutConfig, RunConfig
from gridformer.parallel.auto.decisions import Decisions
from gridformer.parallel.pipeline.partition import model_outline, stages_of
from gridformer.parallel.pipeline.schedules import Action, Itinerary, actions_of, forwards
from gridformer.parallel.pipeline.stages import inputs_of
from gridformer.record.step import MESSAGES, PASSES, StepPart

_MOST = 12  # micro-batches of a short schedule
PartKey = tuple[Hashable, ...]  # the kind of a part, and what else decides what it records


class ShortSchedule(NamedTuple):
    """A shorter schedule of a rank, the keys of its parts, and those of longer schedules.

    A longer schedule that has other keys is None.
    """

    itinerary: Itinerary
    keys: list[PartKey]
    schedules: list[list[PartKey] | None]


def shortened(layout: LayoutConfig, indices: Sequence[int], training: bool = True) -> ShortSchedule:
    """Returns a short schedule that has all kinds of parts of a rank, and those of other ranks.

    Args:
        layout: The layout.
        indices: The indices along pp of ranks. The first is that of the schedule's rank.
        training: Whether there are backward passes.
    """
    pp, m = layout.pp, layout.micro_batches
    orders = actions_of(layout, m)
    orders = orders if training else forwards(orders)
    wholes = [Itinerary.of(orders, index, layout) for index in indices]
    schedules = [keys_of(whole, pp) for whole in wholes]
    wanted = [{*keys} for keys in schedules]
    short, best, there, most = wholes[0], schedules[0], wanted[0], 0
    for micros in _few_micro_batches(m):
        other = _with_micro_batches(wholes[0], micros)
        keys = keys_of(other, pp)
        kinds = {*keys}
        covered = sum(one <= kinds for one in wanted) if wanted[0] <= kinds else 0
        if covered > most:
            short, best, there, most = other, keys, kinds, covered
        if covered == len(wanted):
            break
    if not most:
        short = _with_micro_batches(wholes[0], _needed(wholes[0], m, pp))
        best = keys_of(short, pp)
        there = {*best}
    return ShortSchedule(
        short, best, [keys if one <= there else None for keys, one in zip(schedules, wanted)]
    )


def _few_micro_batches(m: int) -> Iterator[set[int]]:
    """Yields the first of m micro-batches, or the first and the last."""
    for n in range(1, min(m, _MOST + 1)):
        for last in sorted({0, n // 2}) if n > 2 else (0,):
            yield {*range(n - last), *range(m - last, m)}


def _needed(whole: Itinerary, m: int, pp: int) -> set[int]:
    """Leaves out micro-batches, many and then few at a time, as long as all kinds of parts remain.

    Stages in a V need some from the middle of a step.
    """
    needed, wanted, size = [*range(m)], {*keys_of(whole, pp)}, m // 2
    while size:
        at = 0
        while at < len(needed):
            fewer = needed[:at] + needed[at + size :]
            if wanted <= {*keys_of(_with_micro_batches(whole, {*fewer}), pp)}:
                needed = fewer
            else:
                at += size
        size //= 2
    return {*needed}


def _with_micro_batches(whole: Itinerary, micros: set[int]) -> Itinerary:
    """Returns a schedule with some of its micro-batches."""
    actions = tuple(a for a in whole.actions if a.micro in micros)
    mine = {*actions}
    sends = {a: message for a, message in whole.sends.items() if a in mine}
    sent = {message for message, _ in sends.values()}
    taken: dict[Action, tuple[Action, ...]] = {}
    for coming in whole.arrivals.values():
        read: tuple[Action, ...] = ()
        for message in coming:
            read += tuple(one for one in whole.taken[message] if one in sent)
            if message in mine:
                taken[message], read = read, ()
    arrivals = {
        peer: tuple(one for one in coming if one in mine) for peer, coming in whole.arrivals.items()
    }
    return Itinerary(actions, sends, arrivals, taken)


def alike_stages(run: RunConfig, decisions: Decisions) -> list[list[int]]:
    """Returns the places along pp, in one list for all places whose stages do the same.

    They have equal layers and equal inputs, and so have the stages after them, on other ranks.
    """
    layout = run.layout
    if layout.pp == 1:
        return [[0]]
    links = model_outline(run.model).links()
    names = [link.name.rstrip("0123456789") for link in links]
    stages, there = (
        stages_of(run.model, layout.n_stages, decisions.choices.work),
        layout.stage_ranks,
    )
    places: dict[Hashable, list[int]] = {}
    held = [
        (
            tuple(names[i] for i in stage),
            *(tuple(inputs_of(links, at)) for at in (stage.start, stage.stop)),
            stage.start == 0,
            there[number : number + 1] == there[number + 1 : number + 2],  # no message follows
        )
        for number, stage in enumerate(stages)
    ]
    for place in range(layout.pp):
        mine = layout.stages_on(place)
        places.setdefault(tuple(held[i] for i in mine), []).append(place)
    return [*places.values()]


def keys_of(itinerary: Itinerary, pp: int) -> list[PartKey]:
    """Returns the keys of the parts of a rank's step in a pipeline of `pp` ranks, in order."""
    queues = {peer: deque(coming) for peer, coming in itinerary.arrivals.items()}
    sender = {action: peer for peer, coming in itinerary.arrivals.items() for action in coming}
    last = {a.stage: a for a in itinerary.actions if a.kind != "forward"}
    posted: dict[int, list[Action]] = {peer: [] for peer in queues}
    sent: dict[int, list[Action]] = {}
    sent_by: dict[Action, tuple[int, int]] = {}  # the other rank, and the stage
    seen: set[tuple[str, int]] = set()
    made: dict[int, str] = {}  # the kind of the last pass of a stage that made gradients
    micros: set[int] = set()
    keys: list[PartKey] = []

    def post(peer: int, first: bool = False) -> Iterator[PartKey]:
        if queues[peer]:
            action = queues[peer].popleft()
            posted[peer].append(action)
            yield f"{action.kind} posted", action.stage // pp, first

    def end(message: Action) -> Iterator[PartKey]:
        if message in sent_by:
            peer, stage = sent_by.pop(message)
            nth = sent[peer].index(message)
            del sent[peer][nth]
            yield f"{message.kind} sent", stage // pp, nth

    for peer in queues:
        keys += post(peer, not keys)  # the first one has what comes before it
    for action in itinerary.actions:
        kind, stage, micro = action
        if (peer := sender.get(action, -1)) >= 0:
            while action not in posted[peer]:
                keys += post(peer)
            keys += post(peer)
            nth = posted[peer].index(action)
            del posted[peer][nth]
            keys.append(("recv", kind, stage // pp, nth))
            for message in itinerary.taken[action]:
                keys += end(message)
        ends, again = last.get(stage) == action, (kind, stage) in seen
        fresh = micro not in micros  # stamps of dropout are copied to the device
        after = kind != "forward" and made.get(stage) == "weight"  # which may have sent them all
        keys.append((kind, stage // pp, again, ends, fresh, not micros, after))
        if kind != "forward":
            made[stage] = kind
        if action in itinerary.sends:
            message, peer = itinerary.sends[action]
            sent.setdefault(peer, []).append(message)
            sent_by[message] = peer, stage
            keys.append(("send", kind, stage // pp))
        seen.add((kind, stage))
        micros.add(micro)
    for message in [*sent_by]:
        keys += end(message)
    return keys


def in_order(
    parts: Sequence[StepPart], short: Sequence[PartKey], schedule: Sequence[PartKey]
) -> list[int]:
    """Returns the numbers of the parts of a short step in the order of a rank's own schedule.

    Args:
        parts: The parts of the short step.
        short: The keys of its passes and messages.
        schedule: Those of the rank's own schedule.
    """
    places = [i for i, part in enumerate(parts) if part.kind in (*PASSES, *MESSAGES)]
    kinds = {parts[i].kind for i in places}  # a rank without activations exchanges no messages
    numbers: dict[PartKey, int] = {}
    for key, number in zip((key for key in short if key[0] in kinds), places, strict=True):
        assert parts[number].kind == key[0]
        numbers.setdefault(key, number)
    passes = [numbers[key] for key in schedule if key[0] in kinds]
    others = {*range(places[0], len(parts))} - {*places}
    return [*range(places[0]), *passes, *sorted(others)]
