"""Reads the timeline of a step (trace-step-N.json) for a page: what each process did when.

See `gridformer.train.trace`, which writes it.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gridformer.utils.errors import UserError
from gridformer.utils.files import read_bytes
from gridformer.utils.units import MIB

_MOST_RANKS = 16
_MOST_SLICES = 1500  # of a rank and a track
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
    """Messages of one purpose.

    Attributes:
        axis: The axis.
        op: The collective.
        label: The purpose.
        messages: How many messages a process sends or receives, the mean over processes.
        bytes: How many bytes these have, the mean over processes.
    """

    axis: str
    op: str
    label: str
    messages: float
    bytes: float


@dataclass(frozen=True)
class StepTimeline:
    """The timeline of a step.

    Attributes:
        step: The number of the step.
        names: The names of the processes shown, such as `rank 0 (row 0)`.
        work: What each of them did, without its waits.
        waits: When each of them waited for messages.
        messages: When its messages were under way.
        seconds: For each of them, seconds by kind; waits are `waits for AXIS`.
        n_ranks: How many processes the file has.
        traffic: All messages, the most bytes first.
    """

    step: int
    names: list[str]
    work: list[list[Slice]]
    waits: list[list[Slice]]
    messages: list[list[Slice]]
    seconds: list[dict[str, float]]
    n_ranks: int
    traffic: list[PurposeTraffic] = field(default_factory=list)

    @property
    def end(self) -> float:
        """When the step was over, in milliseconds."""
        every = (*self.work, *self.waits)
        return max((one.end for slices in every for one in slices), default=0.0)


def read_timeline(path: Path) -> StepTimeline | None:
    """Reads a timeline.

    Returns:
        The timeline; None if the file is damaged, too large for a page, or of something else.
    """
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
    traffic: Counter[tuple[str, str, str]] = Counter()
    n_bytes: Counter[tuple[str, str, str]] = Counter()
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
            begun[event["id"]] = event["ts"] / 1000.0, str(event["args"].get("axis", ""))
            op = str(event["name"]).partition(": ")[2].partition(",")[0]
            key = str(event["args"].get("axis", "")), op, str(event["args"].get("label", ""))
            traffic[key] += 1
            n_bytes[key] += event["args"].get("bytes", 0)
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
        [
            PurposeTraffic(*key, count / len(names), n_bytes[key] / len(names))
            for key, count in sorted(traffic.items(), key=lambda item: -n_bytes[item[0]])
        ],
    )


def _seconds(work: Sequence[Slice], waits: Sequence[Slice]) -> dict[str, float]:
    """Returns seconds by kind: waits count as waits only, whatever the process waited in."""
    edges: list[tuple[float, int, int, Slice]] = []
    for level, slices in ((0, work), (1, waits)):
        for one in slices:
            edges += [(one.start, 1, level, one), (one.end, 0, level, one)]
    edges.sort(key=lambda edge: (edge[0], edge[1]))
    inside: tuple[list[Slice], list[Slice]] = ([], [])
    found: defaultdict[str, float] = defaultdict(float)
    before = edges[0][0] if edges else 0.0
    for when, opens, level, one in edges:
        # The one that began last is the innermost of those that enclose each other.
        current = inside[1] or inside[0]
        found[current[-1].kind if current else "between"] += (when - before) / 1000.0
        before = when
        if opens:
            inside[level].append(one)
        else:
            inside[level].remove(one)
    return {kind: seconds for kind, seconds in found.items() if seconds > 0.0}


def _fewer(slices: list[Slice]) -> list[Slice]:
    """Joins neighbors of one kind where there are more than a screen shows."""
    slices = sorted(slices)
    gap = (max((one.end for one in slices), default=0.0) - (slices[0].start if slices else 0.0)) / (
        2 * _MOST_SLICES
    )
    for doubled in range(_MOST_SLICES.bit_length() + 2):
        if len(slices) <= _MOST_SLICES:
            break
        width = gap * 2**doubled
        joined: list[Slice] = []
        last: dict[str, int] = {}
        for one in slices:
            at = last.get(one.kind)
            if at is not None and one.start - joined[at].end <= width:
                end = max(joined[at].end, one.end)
                joined[at] = Slice(joined[at].start, end, one.kind, f"several: {one.kind}")
            else:
                last[one.kind] = len(joined)
                joined.append(one)
        slices = joined
    return slices
