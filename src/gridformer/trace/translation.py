"""Puts events of one rank into the groups of another rank that does the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gridformer.trace.events import Event, Member, Start, Trace

Translation = Callable[[Sequence[Event]], tuple[Event, ...]]


def translation(one: Trace, other: Trace, events: Sequence[Event]) -> Translation | None:
    """Returns a function that puts events of one rank into the groups of the other, if it has them.

    Args:
        one: The trace of the rank whose events they are.
        other: The trace of the other rank.
        events: Some of the events.
    """
    theirs = {place: member for member, place in _places_of(other).items()}
    groups = {
        member.name: (member.ranks, theirs[place])
        for member, place in _places_of(one).items()
        if place in theirs
    }
    if any(isinstance(event, Start) and event.group not in groups for event in events):
        return None

    def translated(event: Event) -> Event:
        if not isinstance(event, Start) or event.group not in groups:
            return event
        before, group = groups[event.group]
        parts = tuple(
            part._replace(peer=group.ranks[before.index(part.peer)]) for part in event.parts
        )
        return event._replace(group=group.name, ranks=group.ranks, parts=parts)

    return lambda found: tuple(translated(event) for event in found)


def _places_of(trace: Trace) -> dict[Member, tuple[str, int, int]]:
    """Returns for each group of a rank what it shares with the corresponding group of another rank.

    This is its purpose, its size, and its number among such groups.
    """
    found: dict[Member, tuple[str, int, int]] = {}
    for member in trace.own:
        key = member.purpose, len(member.ranks)
        found[member] = (*key, sum(place[:2] == key for place in found.values()))
    return found
