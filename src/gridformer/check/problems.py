"""The problems of a run, as a user reads them, and those that the replay of all ranks has found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from gridformer.check.simulate import Mismatch, Outcome, Stop
from gridformer.memory.ranks import ranges
from gridformer.record.events import Place, Start

KINDS = {
    "device": "tensors of two devices meet",
    "contiguity": "a tensor with gaps is handed to a group",
    "size": "the ends of a message differ in size or type",
    "error": "the step raises an error",
    "untraced": "the step cannot be checked to its end",
    "groups": "ranks create different groups",
    "drift": "copies of a parameter drift apart",
    "order": "ranks call different collectives",
    "unmatched": "a message is never answered",
    "deadlock": "ranks wait for each other in a circle",
    "read-back": "the host waits for the device",
}
# Settings that may help, by the axis of the message. A message that does not fit is an error of
# gridformer.
_AXES = {
    "pp": "layout.pipeline=gpipe, or a smaller layout.pp",
    "dp": "another layout.dp_mode",
    "dp_branch": "another layout.dp_mode",
    "dp_shard": "another layout.dp_mode or layout.shard_over",
    "dp_replicate": "another layout.dp_mode or layout.shard_over",
    "experts": "another layout.experts_over",
    "experts_replicate": "another layout.dp_mode or layout.experts_dp",
    "row": "another layout.schedule, or other layout.rows and layout.cols",
    "col": "another layout.schedule, or other layout.rows and layout.cols",
    "grid": "another layout.schedule, or other layout.rows and layout.cols",
    "branch": "other values of layout.attention and layout.feed_forward, or "
    "train.update=after_backward",
}
REPORT = "this is an error of gridformer and not of the run file: please report it"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        kind: One of `KINDS`.
        ranks: The ranks concerned. If other groups have the same problem, those of the first.
        place: Where in the code of gridformer.
        text: What is wrong, in sentences; there may be several lines.
        remedy: What a user can do.
        axis: The name of the axis of the message; empty if the problem is not about a message.
        alike: How many other groups of ranks have the same problem.
    """

    kind: str
    ranks: tuple[int, ...]
    place: Place
    text: str
    remedy: str
    axis: str = ""
    alike: int = 0

    @property
    def stops(self) -> bool:
        """Whether the run cannot work. Otherwise it is only slow, or the check could not decide."""
        return self.kind not in ("read-back", "untraced")

    def as_json(self) -> dict[str, Any]:
        """Returns the problem for `gridformer check --json`."""
        return {
            "kind": self.kind,
            "ranks": list(self.ranks),
            "axis": self.axis,
            "file": self.place.file,
            "line": self.place.line,
            "function": self.place.function,
            "module": self.place.module,
            "message": self.text,
            "remedy": self.remedy,
            "groups_alike": self.alike,
        }


def _remedy(axis: str) -> str:
    """Returns what a user can do about a message that does not fit."""
    way = _AXES.get(axis)
    return f"{REPORT}. Until it is fixed, try {way}" if way else REPORT


def each_once(problems: Iterable[Problem]) -> list[Problem]:
    """Returns each problem once, even if several groups of ranks have it at the same place."""
    first: dict[tuple[str, str, Place], Problem] = {}
    for problem in problems:
        key = problem.kind, problem.axis, problem.place
        first[key] = replace(first[key], alike=first[key].alike + 1) if key in first else problem
    return list(first.values())


def rank_ranges(ranks: Iterable[int]) -> str:
    """Formats ranks: `rank 3`, `ranks 0-3, 8`."""
    text = ranges(sorted(ranks))
    return f"rank {text}" if text.isdigit() else f"ranks {text}"


# --------------------------------------------------------------------------- of messages


def message_problems(outcome: Outcome) -> Iterator[Problem]:
    """Returns the problems that a replay has found.

    A group that calls different collectives cannot go on, and neither can the ranks that wait for
    it, so stops for that reason are not reported again. Of the messages of a group that do not fit,
    only the first is reported: if a rank has left one out, no later one fits.
    """
    first = {next(iter(m.calls.values())).group: m for m in reversed(outcome.mismatches)}
    yield from (_mismatch(mismatch, outcome) for mismatch in first.values())
    left = [stop for stop in outcome.stops if stop.call.group not in first]
    never = [stop for stop in left if set(stop.missing) & outcome.ended]
    of_groups: dict[str, Stop] = {}
    for stop in never:
        of_groups.setdefault(stop.call.group, stop)
    yield from (_unmatched(stop, outcome) for stop in of_groups.values())
    if not never and not any(mismatch.order for mismatch in outcome.mismatches):
        yield from _circles(left)


def _mismatch(mismatch: Mismatch, outcome: Outcome) -> Problem:
    calls, different = mismatch.calls, mismatch.different
    usual = next(rank for rank in calls if rank not in different)
    one, other = calls[usual], calls[different[0]]
    text = (
        f"{rank_ranges(different)}: {_described(other, usual)} at {other.place}, but rank {usual}: "
        f"{_described(one, different[0])} at {one.place}{_numbers(one, outcome)}"
    )
    kind = "order" if mismatch.order else "size"
    return Problem(kind, tuple(calls), other.place, text, _remedy(other.axis), other.axis)


def _unmatched(stop: Stop, outcome: Outcome) -> Problem:
    call = stop.blocking
    missing = sorted(set(stop.missing) & outcome.ended)
    text = (
        f"rank {stop.rank} calls {_described(call)} at {call.place}, but "
        f"{rank_ranges(missing)} {'comes' if len(missing) == 1 else 'come'} to the end of "
        f"the step without it{_numbers(call, outcome)}"
    )
    ranks = tuple(sorted({stop.rank, *missing}))
    return Problem("unmatched", ranks, call.place, text, _remedy(call.axis), call.axis)


def _numbers(call: Start, outcome: Outcome) -> str:
    """Returns a clause that says which ranks of a group start fewer collectives than others."""
    counts = outcome.counts.get(call.group, Counter())
    most = max(counts.values(), default=0)
    fewer = {rank: most - started for rank, started in counts.items() if started < most}
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
        line = f"rank {stop.rank} waits at {stop.waiting} for {_described(stop.call)}"
        if stop.blocking.number != stop.call.number:
            line += (
                f"; before it in the same group comes {_described(stop.blocking)}, started at "
                f"{stop.blocking.place}"
            )
        line += f", which needs rank {after.rank}"
        if after.rank in stop.answers:
            answer, before = stop.answers[after.rank]
            line += (
                f"; that rank has started its part at {answer.place}, but before it in the same "
                f"group comes {_described(before)}"
            )
        lines.append(line)
    first = min(stops, key=lambda stop: stop.rank)
    assert first.waiting is not None
    ranks, axis = tuple(sorted(stop.rank for stop in stops)), first.call.axis
    return Problem("deadlock", ranks, first.waiting, "\n".join(lines), _remedy(axis), axis)


def _described(call: Start, peer: int | None = None) -> str:
    """Describes a message, such as `all_reduce of 96 float32 over dp ("gradients")`.

    Of messages between two ranks, only those with a peer are described, if it is given.
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
