"""Summarizes what ranks do when, so that a step of many thousand kernels can be drawn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gridformer.plan.replay import Interval

BINS = 400  # of a step; in each of them the kind that takes most of the time is shown
MOST_RANKS = 8


class Segment(NamedTuple):
    """A part of a row of the timeline, in which one kind takes most of the time."""

    row: str
    kind: str
    start: float
    end: float


def summarized(timeline: Mapping[int, Sequence[Interval]]) -> list[Segment]:
    """Returns the segments of the streams of some ranks.

    Args:
        timeline: `Prediction.timeline`.
    """
    end = max((one.end for some in timeline.values() for one in some), default=0.0)
    found = []
    ranks = sorted(timeline)
    shown = ranks if len(ranks) <= MOST_RANKS else [*ranks[: MOST_RANKS - 1], ranks[-1]]
    for rank in shown:
        streams: dict[str, list[Interval]] = defaultdict(list)
        for one in timeline[rank]:
            streams[one.stream].append(one)
        for stream in sorted(streams, key=lambda name: (name != "compute", name)):
            kinds = _kinds(streams[stream], end / BINS, stream)
            found += _joined(f"rank {rank} {stream}", kinds, end / BINS)
    return found


def _kinds(intervals: Sequence[Interval], width: float, stream: str) -> list[str]:
    """Returns the kind of each bin; empty where most of it is idle."""
    bins: list[dict[str, float]] = [defaultdict(float) for _ in range(BINS)]
    for one in intervals:
        kind = one.kind if stream == "compute" else stream
        first, last = int(one.start / width), min(BINS - 1, int(one.end / width))
        for i in range(first, last + 1):
            bins[i][kind] += min(one.end, (i + 1) * width) - max(one.start, i * width)
    found = []
    for some in bins:
        kind = max(some, key=lambda name: some[name], default="")
        found.append(kind if sum(some.values()) > width / 2 else "")
    return found


def _joined(row: str, kinds: Sequence[str], width: float) -> list[Segment]:
    found: list[Segment] = []
    for i, kind in enumerate(kinds):
        if not kind:
            continue
        if found and found[-1].kind == kind and abs(found[-1].end - i * width) < width / 2:
            found[-1] = found[-1]._replace(end=(i + 1) * width)
        else:
            found.append(Segment(row, kind, i * width, (i + 1) * width))
    return found
