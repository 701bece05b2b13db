"""The results file: one JSON line for each finished group; the newest line of a group counts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.schemes.cases import Case


@dataclass(frozen=True)
class Row:
    """One variant of a group.

    Seconds are those of the slowest rank and bytes those of the fullest, both for the whole stack.

    Attributes:
        obstacles: Why the variant could not run; if there are any, nothing else is set.
        seconds: [forward, backward] of every round.
        count: Collectives by kind, in forward and backward.
        moved: Elements moved, for the whole stack.
        formula: Elements that the formula asks for, for one layer.
        live: Bytes by kind (benchmarks.schemes.live.Live).
        worst: The largest relative difference to one process, of y, dx and the weights' gradients.
    """

    name: str
    title: str
    obstacles: list[str]
    threads: int = 0
    seconds: list[list[float]] | None = None
    count: list[dict[str, int]] | None = None
    moved: list[float] | None = None
    formula: list[float] | None = None
    live: dict[str, int] | None = None
    worst: dict[str, float] | None = None


@dataclass(frozen=True)
class Group:
    """A finished case, with its variants, which alternated in one run."""

    key: str
    title: str
    name: str
    processes: int
    recompute: bool
    size: dict[str, int]
    rounds: int
    rows: list[Row]
    machine: dict[str, str]

    def covers(self, case: Case, variants: Iterable[str], rounds: int) -> bool:
        """Return whether this has the shape, the variants and at least the rounds now asked for."""
        names = {row.name for row in self.rows}
        same = self.key == case.key and self.size == asdict(case.size)
        return same and names.issuperset(variants) and self.rounds >= rounds


def read(path: Path) -> dict[str, Group]:
    """Read groups by key, skipping a line that was cut off when a run was killed."""
    groups: dict[str, Group] = {}
    if not path.exists():
        return groups
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            values: dict[str, Any] = json.loads(line)
            rows = [Row(**row) for row in values.pop("rows")]
            group = Group(rows=rows, **values)
        except (ValueError, KeyError, TypeError):
            continue
        groups[group.key] = group
    return groups


def append(path: Path, group: Group) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    cut_off = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if cut_off else "") + json.dumps(asdict(group)) + "\n")
