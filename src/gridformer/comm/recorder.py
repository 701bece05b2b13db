"""Counts what travels: every collective of the package passes here when a recorder is open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from gridformer.comm.axis import Axis

Targets = Literal["all"] | Iterable[int]


@dataclass(frozen=True)
class Record:
    """One collective as one rank took part in it.

    `moved` is the number of elements that must cross this rank's link whatever the algorithm:
    received (all-gather, broadcast) or sent (reduce, reduce-scatter); an all-reduce is both.
    These are the volumes of ring and pipelined algorithms, which the specification's formulas
    count. A broadcast's root and a reduce's target therefore move nothing. Where messages differ
    (all-to-all, scatter, gather, exchange) it is what this rank sends or what it receives, the
    larger.
    `targets` are the ranks of the world that get something of this rank's, itself included.
    """

    op: str
    axis: str
    size: int
    moved: float
    itemsize: int
    label: str
    targets: tuple[int, ...] = ()


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

    def messages(self, rank: int, devices_per_node: int, label: str = "") -> tuple[int, int]:
        """Messages of `rank`, whose records these are, within its node and to other nodes.

        Nodes hold consecutive ranks. One message for each rank that gets something of this one's,
        itself included, as the specification's section 4 counts them.
        """
        node = rank // devices_per_node
        targets = [t // devices_per_node for r in self._select(label, "") for t in r.targets]
        within = targets.count(node)
        return within, len(targets) - within

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


def note(
    op: str, axis: Axis, moved: float, itemsize: int, label: str, targets: Targets = "all"
) -> None:
    """Tell the open recorders of a collective over `axis`. Costs nothing when there is none.

    targets: indices along the axis of the ranks that get something of this one's.
    """
    if not _open:
        return
    ranks = axis.ranks
    to = ranks if targets == "all" else tuple(ranks[i] for i in targets)
    for recorder in _open:
        recorder.records.append(Record(op, axis.name, axis.size, moved, itemsize, label, to))
