"""The problems of a run, as a user reads them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from gridformer.record.events import Place

KINDS = {
    "device": "tensors of two devices meet",
    "contiguity": "a tensor with gaps is handed to a group",
    "size": "the ends of a message differ in size or type",
    "error": "the step raises an error",
    "untraced": "the step cannot be checked to its end",
    "groups": "ranks create different groups",
    "calls": "creating groups takes a call for each of them",
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
    "row": "another layout.schedule, or other layout.rows and layout.cols",
    "col": "another layout.schedule, or other layout.rows and layout.cols",
    "grid": "another layout.schedule, or other layout.rows and layout.cols",
    "branch": "other values of layout.attention and layout.feed_forward, or "
    "train.update=after_backward",
}
_REPORT = "this is an error of gridformer and not of the run file: please report it"


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
        return self.kind not in ("read-back", "calls", "untraced")

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


def message_remedy(axis: str) -> str:
    """Returns what a user can do about a message that does not fit."""
    way = _AXES.get(axis)
    return f"{_REPORT}. Until it is fixed, try {way}" if way else _REPORT


def each_once(problems: Iterable[Problem]) -> list[Problem]:
    """Returns each problem once, even if several groups of ranks have it at the same place."""
    found: dict[tuple[str, str, Place], Problem] = {}
    for problem in problems:
        key = problem.kind, problem.axis, problem.place
        first = found.get(key)
        found[key] = problem if first is None else replace(first, alike=first.alike + 1)
    return list(found.values())


def rank_ranges(ranks: Iterable[int]) -> str:
    """Formats ranks: `rank 3`, `ranks 0-3, 8`."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    texts = [f"{p[0]}-{p[-1]}" if len(p) > 1 else f"{p[0]}" for p in parts]
    one = len(parts) == 1 and len(parts[0]) == 1
    return f"rank{'' if one else 's'} {', '.join(texts)}"
