"""Says why a run hangs over NCCL, where no rank waits in a message: the host only queues it.

A rank's host is blocked where it reads a result from its GPU, which may be long after the message
that does not end. What is known is which messages each rank has started. A rank that has started
fewer of a group than another one holds it up, or is itself held up by one that is further behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from gridformer.comm.progress_file import COLLECTIVE, RECEIVE, SEND, Lane

if TYPE_CHECKING:
    from gridformer.launch.hang import Seen


class Behind(NamedTuple):
    """A rank that has started fewer messages of a group than another.

    Attributes:
        rank: The rank.
        ahead: The other rank.
        started: How many it has started.
        most: How many the other rank has started.
        lane: The messages of the group, as the other rank counts them.
    """

    rank: int
    ahead: int
    started: int
    most: int
    lane: Lane


def last_ones(ranks: Mapping[int, Seen]) -> list[Behind]:
    """Returns the ranks that are behind others, without those that are behind because of them."""
    behind = [*_behind(ranks, COLLECTIVE)] or [*_behind(ranks, SEND)]
    held_up_by: dict[int, set[int]] = {}
    for one in behind:
        held_up_by.setdefault(one.ahead, set()).add(one.rank)
    found: dict[int, Behind] = {}
    for one in behind:
        if not held_up_by.get(one.rank):
            found.setdefault(one.rank, one)
    if not found:  # each is behind another one: name those that are furthest behind
        most = max((one.most - one.started for one in behind), default=0)
        found = {one.rank: one for one in behind if one.most - one.started == most}
    return [found[rank] for rank in sorted(found)]


def different(ranks: Mapping[int, Seen]) -> tuple[tuple[int, ...], str] | None:
    """Returns which ranks have started different messages under one number, and what they are."""
    for seen in ranks.values():
        for lane in _lanes(seen):
            if lane.kind != COLLECTIVE:
                continue
            for other in lane.ranks:
                theirs = _lane(ranks, other, lane.key)
                if other <= seen.rank or theirs is None:
                    continue
                for number in sorted({*lane.recent} & {*theirs.recent}):
                    one, two = lane.recent[number], theirs.recent[number]
                    if one.size < 0 or two.size < 0:
                        one, two = replace(one, size=0), replace(two, size=0)
                    if one != two:
                        return (seen.rank, other), (
                            f"ranks start different messages: number {number} of a group is {one} "
                            f"on rank {seen.rank}, but {two} on rank {other}"
                        )
    return None


def told(found: Sequence[Behind], ranks: Mapping[int, Seen]) -> str:
    """Returns in words what is known of the ranks that are behind.

    Args:
        found: The ranks that are behind, of which the first four are named.
        ranks: What is known of each rank.
    """
    texts = []
    for one in found[:4]:
        message = one.lane.recent.get(one.started + 1)
        which = f", so not {message}" if message else ""
        texts.append(
            f"{ranks[one.rank].who} has started {one.started} of the {one.most} messages that "
            f"rank {one.ahead} of its group has started{which}"
        )
    return "; ".join(texts) + (f"; and {len(found) - 4} more" if len(found) > 4 else "")


def _behind(ranks: Mapping[int, Seen], kind: str) -> Iterator[Behind]:
    for seen in ranks.values():
        for lane in _lanes(seen):
            if lane.kind != kind:
                continue
            others = lane.ranks if kind == COLLECTIVE else (lane.peer,)
            key = lane.key if kind == COLLECTIVE else (lane.group, RECEIVE, seen.rank)
            for other in others:
                if other == seen.rank or other not in ranks or ranks[other].state is None:
                    continue
                theirs = _lane(ranks, other, key)
                started = theirs.started if theirs else 0
                if started < lane.started:
                    yield Behind(other, seen.rank, started, lane.started, lane)


def _lanes(seen: Seen) -> Sequence[Lane]:
    return [*seen.state.lanes.values()] if seen.state else []


def _lane(ranks: Mapping[int, Seen], rank: int, key: tuple[str, str, int]) -> Lane | None:
    state = ranks[rank].state if rank in ranks else None
    return state.lanes.get(key) if state else None
