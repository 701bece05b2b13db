"""Reads the timeline of a step (trace-step-N.json), which `gridformer.train.trace` writes."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gridformer.utils.errors import UserError
from gridformer.utils.files import read_bytes
from gridformer.utils.units import MIB

_MOST_RANKS = 16
_MOST_SLICES = 1500  # of a rank, a track and a kind
_MOST_BYTES = 256 * MIB
_LARGEST = 1e15  # of a number in a trace: microseconds of 30 years
_NUMBER = re.compile(r"trace-step-(\d+)\.json")


class Slice(NamedTuple):
    """An interval of one process, in milliseconds since the step began."""

    start: float
    end: float
    kind: str
    name: str


class PurposeTraffic(NamedTuple):
    """Messages of one purpose that a process sends or receives, the mean over processes."""

    axis: str
    op: str
    label: str
    messages: float
    bytes: float


@dataclass(frozen=True)
class StepTimeline:
    """The timeline of a step, of the first processes."""

    step: int
    names: list[str]  # of the processes, such as `rank 0 (row 0)`
    work: list[list[Slice]]  # of each process, without its waits
    waits: list[list[Slice]]  # for messages
    messages: list[list[Slice]]  # under way
    seconds: list[dict[str, float]]  # of each process, by kind; waits are `waits for AXIS`
    n_ranks: int  # how many processes the file has
    traffic: list[PurposeTraffic] = field(default_factory=list)  # the most bytes first


def traffic_of(
    messages: Iterable[tuple[str, str, str, float]], n_ranks: int = 1
) -> list[PurposeTraffic]:
    """Adds up the messages of some ranks, each with its axis, collective, purpose and bytes."""
    sizes: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
    for axis, op, label, n_bytes in messages:
        sizes[axis, op, label].append(n_bytes)
    return [
        PurposeTraffic(*key, len(some) / n_ranks, sum(some) / n_ranks)
        for key, some in sorted(sizes.items(), key=lambda item: -sum(item[1]))
    ]


def read_timeline(path: Path) -> StepTimeline | None:
    """Reads a timeline; None if the file is damaged, too large for a page, or of something else."""
    named = _NUMBER.fullmatch(path.name)
    try:
        if named is None:
            return None
        content, read = read_bytes(path, _MOST_BYTES), _number
        whole = json.loads(content, parse_int=read, parse_float=read, parse_constant=read)
        return _timeline(int(named[1]), whole["traceEvents"])
    except (UserError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _number(text: str) -> float:
    if not abs(value := float(text)) <= _LARGEST:  # also NaN
        raise ValueError(f"{text[:20]} is no time")
    return value


def _timeline(step: int, events: Sequence[dict[str, Any]]) -> StepTimeline | None:
    names: dict[int, str] = {}
    work: defaultdict[int, list[Slice]] = defaultdict(list)
    waits: defaultdict[int, list[Slice]] = defaultdict(list)
    messages: defaultdict[int, list[Slice]] = defaultdict(list)
    begun: dict[str, tuple[float, str]] = {}
    traffic: list[tuple[str, str, str, float]] = []
    for event in events:
        rank, phase = int(event["pid"]), event["ph"]
        if phase == "M" and event["name"] == "process_name":
            names[rank] = str(event["args"]["name"])
        elif phase == "X":
            start = event["ts"] / 1000.0
            end = start + event["dur"] / 1000.0
            if event["cat"] == "wait":
                axis = str(event["args"].get("axis", ""))
                waits[rank].append(Slice(start, end, f"waits for {axis}", str(event["name"])))
            else:
                name = str(event["name"])
                work[rank].append(Slice(start, end, name.rstrip(" 0123456789"), name))
        elif phase == "b":
            axis, label = (str(event["args"].get(key, "")) for key in ("axis", "label"))
            begun[event["id"]] = event["ts"] / 1000.0, axis
            op = str(event["name"]).partition(": ")[2].partition(",")[0]
            traffic.append((axis, op, label, event["args"].get("bytes", 0)))
        elif phase == "e" and event["id"] in begun:
            start, axis = begun.pop(event["id"])
            name = str(event["name"])
            messages[rank].append(Slice(start, event["ts"] / 1000.0, axis, name))
    if not names:
        return None
    ranks = sorted(names)[:_MOST_RANKS]
    return StepTimeline(
        step,
        [names[rank] for rank in ranks],
        [_fewer(work[rank]) for rank in ranks],
        [_fewer(waits[rank]) for rank in ranks],
        [_fewer(messages[rank]) for rank in ranks],
        [_seconds(work[rank], waits[rank]) for rank in ranks],
        len(names),
        traffic_of(traffic, len(names)),
    )


def _seconds(work: Sequence[Slice], waits: Sequence[Slice]) -> dict[str, float]:
    """Returns seconds by kind: waits count as waits only, whatever the process waited in."""
    edges: list[tuple[float, int, int, Slice]] = []
    for level, slices in ((0, work), (1, waits)):
        for one in (one for one in slices if one.end > one.start):
            edges += [(one.start, 1, level, one), (one.end, 0, level, one)]
    edges.sort(key=lambda edge: (edge[0], edge[1]))
    inside: tuple[list[Slice], list[Slice]] = ([], [])
    spent: defaultdict[str, float] = defaultdict(float)
    before = edges[0][0] if edges else 0.0
    for when, opens, level, one in edges:
        # The one that began last is the innermost of those that enclose each other.
        current = inside[1] or inside[0]
        spent[current[-1].kind if current else "between"] += (when - before) / 1000.0
        before = when
        if opens:
            inside[level].append(one)
        else:
            inside[level].remove(one)
    return {kind: seconds for kind, seconds in spent.items() if seconds > 0.0}


def _fewer(slices: list[Slice]) -> list[Slice]:
    """Joins neighbors of one kind where there are more than a screen shows."""
    slices = sorted(slices)
    if len(slices) <= _MOST_SLICES:
        return slices
    gap = (max(one.end for one in slices) - slices[0].start) / _MOST_SLICES
    joined: list[Slice] = []
    last: dict[str, int] = {}  # the number of the last joined slice of each kind
    for one in slices:
        at = last.get(one.kind)
        if at is not None and one.start - joined[at].end <= gap:
            end = max(joined[at].end, one.end)
            joined[at] = Slice(joined[at].start, end, one.kind, f"several: {one.kind}")
        else:
            last[one.kind] = len(joined)
            joined.append(one)
    return joined
