"""Finds what is wrong with the messages of a step, from the replay of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from gridformer.check.problems import Problem, message_remedy, rank_ranges
from gridformer.check.simulate import Mismatch, Outcome, Stop
from gridformer.record.events import Start


def message_problems(outcome: Outcome) -> Iterator[Problem]:
    """Returns the problems that a replay has found.

    A group that calls different collectives cannot go on, and neither can the ranks that wait for
    it, so stops for that reason are not reported again. Of the messages of a group that do not fit,
    only the first is reported: if a rank has left one out, no later one fits.
    """
    broken = {_one(m.calls).group for m in outcome.mismatches if m.order}
    first = {_one(m.calls).group: m for m in reversed(outcome.mismatches)}
    yield from (_mismatch(found, outcome) for found in first.values())
    left = [stop for stop in outcome.stops if stop.call.group not in first]
    never = [stop for stop in left if set(stop.missing) & outcome.ended]
    yield from (_unmatched(stop, outcome) for stop in _first_of_group(never))
    if not broken and not never:
        yield from _circles(left)


def _mismatch(found: Mismatch, outcome: Outcome) -> Problem:
    usual = next(rank for rank in found.calls if rank not in found.different)
    first = found.different[0]
    one, other = found.calls[usual], found.calls[first]
    text = (
        f"{rank_ranges(found.different)}: {described_call(other, usual)} at {other.place}, but "
        f"rank {usual}: {described_call(one, first)} at {one.place}{_numbers(one, outcome)}"
    )
    kind = "order" if found.order else "size"
    return Problem(
        kind, tuple(found.calls), other.place, text, message_remedy(other.axis), other.axis
    )


def _unmatched(stop: Stop, outcome: Outcome) -> Problem:
    call = stop.blocking
    missing = sorted(set(stop.missing) & outcome.ended)
    text = (
        f"rank {stop.rank} calls {described_call(call)} at {call.place}, but "
        f"{rank_ranges(missing)} {'comes' if len(missing) == 1 else 'come'} to the end of "
        f"the step without it{_numbers(call, outcome)}"
    )
    apart = outcome.apart.get(call.group)
    if apart:
        (a, one), (b, other) = _two_places(apart)
        text += (
            f". The ranks may have parted earlier, where rank {a} was at {one.place} and rank {b} "
            f"at {other.place}"
        )
    ranks = tuple(sorted({stop.rank, *missing}))
    return Problem("unmatched", ranks, call.place, text, message_remedy(call.axis), call.axis)


def _numbers(call: Start, outcome: Outcome) -> str:
    """Returns a clause that says which ranks of a group start fewer collectives than others."""
    counts: Mapping[int, int] = outcome.counts.get(call.group, {})
    most = max(counts.values(), default=0)
    fewer = {rank: most - n for rank in call.ranks if (n := counts.get(rank, 0)) < most}
    if call.op == "p2p" or not fewer:
        return ""
    n = max(fewer.values())
    who = [rank for rank, less in fewer.items() if less == n]
    number = "one message" if n == 1 else f"{n} messages"
    verb = "starts" if len(who) == 1 else "start"
    return (
        f"; in the whole step {rank_ranges(who)} {verb} {number} less in this group than others do"
    )


def _circles(stops: Iterable[Stop]) -> Iterator[Problem]:
    """Returns the circles of ranks that wait for each other."""
    waits = {stop.rank: stop for stop in stops if stop.waiting is not None}
    seen: set[int] = set()
    for start in waits:
        path: list[int] = []
        rank: int | None = start
        while rank is not None and rank not in seen and rank not in path:
            path.append(rank)
            rank = next((r for r in waits[rank].missing if r in waits), None)
        if rank in path:
            yield _circle([waits[r] for r in path[path.index(rank) :]])
        seen.update(path)


def _circle(stops: list[Stop]) -> Problem:
    lines = []
    for stop, after in zip(stops, [*stops[1:], stops[0]]):
        line = f"rank {stop.rank} waits at {stop.waiting} for {described_call(stop.call)}"
        if stop.blocking.number != stop.call.number:
            line += (
                f"; before it in the same group comes {described_call(stop.blocking)}, started at "
                f"{stop.blocking.place}"
            )
        line += f", which needs rank {after.rank}"
        if after.rank in stop.answers:
            answer, before = stop.answers[after.rank]
            line += (
                f"; that rank has started its part at {answer.place}, but before it in the same "
                f"group comes {described_call(before)}"
            )
        lines.append(line)
    first = min(stops, key=lambda stop: stop.rank)
    assert first.waiting is not None
    ranks, axis = tuple(sorted(stop.rank for stop in stops)), first.call.axis
    return Problem("deadlock", ranks, first.waiting, "\n".join(lines), message_remedy(axis), axis)


def described_call(call: Start, peer: int | None = None) -> str:
    """Describes a message, such as `all_reduce of 96 float32 over dp ("gradients")`.

    Args:
        call: The message.
        peer: For messages between two ranks, the rank at the other end; None means all.
    """
    purpose = f' ("{call.label}")' if call.label else ""
    if call.op != "p2p":
        size = f" of {call.size} {call.dtype}" if call.dtype else ""
        how = f", {call.how}" if call.how else ""
        return f"{call.op}{size} over {call.axis}{how}{purpose}"
    directions = {"send": "to", "recv": "from"}
    parts = [
        f"{part.what} of {part.size} {part.dtype} {directions[part.what]} rank {part.peer}"
        for part in call.parts
        if peer is None or part.peer == peer
    ]
    return f"{' and '.join(parts)} over {call.axis}{purpose}"


def _first_of_group(stops: Iterable[Stop]) -> list[Stop]:
    """Returns one stop of each group."""
    found: dict[str, Stop] = {}
    for stop in stops:
        found.setdefault(stop.call.group, stop)
    return list(found.values())


def _two_places(calls: Mapping[int, Start]) -> tuple[tuple[int, Start], tuple[int, Start]]:
    first, *others = calls.items()
    different = next((o for o in others if o[1].place != first[1].place), others[0])
    return first, different


def _one(calls: Mapping[int, Start]) -> Start:
    return next(iter(calls.values()))
