"""Counts what travels: every collective of the package passes here when a recorder is open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Record:
    """One collective as one rank took part in it.

    `moved` is the number of elements that must cross this rank's link whatever the algorithm:
    received (all-gather, broadcast) or sent (reduce, reduce-scatter); an all-reduce is both.
    These are the volumes of ring and pipelined algorithms, which the specification's formulas
    count. A broadcast's root and a reduce's target therefore move nothing.
    """

    op: str
    axis: str
    size: int
    moved: float
    itemsize: int
    label: str


@dataclass
class Recorder:
    """The records made while `record()` was open, in order."""

    records: list[Record] = field(default_factory=list)

    def moved(self, label: str = "", axis: str = "") -> float:
        """Elements moved by this rank, of records whose label starts with `label` on `axis`."""
        return sum(r.moved for r in self._select(label, axis))

    def bytes(self, label: str = "", axis: str = "") -> float:
        return sum(r.moved * r.itemsize for r in self._select(label, axis))

    def count(self, label: str = "", axis: str = "") -> Counter[str]:
        """How many collectives of each kind were issued."""
        return Counter(r.op for r in self._select(label, axis))

    def _select(self, label: str, axis: str) -> Iterator[Record]:
        return (
            r for r in self.records if r.label.startswith(label) and (not axis or r.axis == axis)
        )


_open: list[Recorder] = []


@contextmanager
def record() -> Iterator[Recorder]:
    """Count the collectives issued inside the block, those of a backward pass included."""
    recorder = Recorder()
    _open.append(recorder)
    try:
        yield recorder
    finally:
        _open.remove(recorder)


def note(op: str, axis: str, size: int, moved: float, itemsize: int, label: str) -> None:
    """Tell the open recorders of a collective. Costs nothing when there is none."""
    for recorder in _open:
        recorder.records.append(Record(op, axis, size, moved, itemsize, label))
