"""Counts what travels: every collective of the package passes here when a recorder is open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

from gridformer.mesh.axes import Axis

Targets = Literal["all"] | Iterable[int]


@dataclass
class Timing:
    """When a collective was started, when its result was first waited for, and when it was there:
    seconds of this process's clock. On a GPU the host's: the device may be behind."""

    began: float
    waited: float = 0.0
    ended: float = 0.0

    def wait(self) -> None:
        self.waited = self.waited or perf_counter()

    def end(self) -> None:
        """The result is there; of what was not waited for on its own, it was waited all along."""
        self.waited, self.ended = self.waited or self.began, perf_counter()


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
    timing: Timing = field(default_factory=lambda: Timing(0.0), compare=False)

    @property
    def bytes(self) -> float:
        return self.moved * self.itemsize


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
) -> Timing | None:
    """Tell the open recorders of a collective over `axis`. Costs nothing when there is none.

    targets: indices along the axis of the ranks that get something of this one's. Returns what the
    caller tells of its end, if anybody listens.
    """
    if not _open:
        return None
    ranks = axis.ranks
    to = ranks if targets == "all" else tuple(ranks[i] for i in targets)
    timing = Timing(perf_counter())
    for recorder in _open:
        recorder.records.append(
            Record(op, axis.name, axis.size, moved, itemsize, label, to, timing)
        )
    return timing
