"""Counts messages: while a recorder is open, every collective of the package is recorded here.

The same call also tells `gridformer.comm.progress` where the process is, and its watch reads that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Literal

from gridformer.comm import progress
from gridformer.mesh.axes import Axis

if TYPE_CHECKING:
    from torch import Tensor

Targets = Literal["all"] | Iterable[int]


@dataclass
class Timing:
    """When a collective began, when its result was first waited for, and when it was done.

    Times are in seconds of the host's performance counter; a GPU may be behind.
    """

    began: float
    waited: float = 0.0
    ended: float = 0.0

    def started(self) -> None:
        """Does nothing; see `gridformer.comm.progress.Posted`."""

    def wait(self) -> None:
        """Notes the time when the caller begins to wait."""
        self.waited = self.waited or perf_counter()

    def end(self) -> None:
        """Notes when the result is there. Without `wait`, the caller waited from the start."""
        self.waited, self.ended = self.waited or self.began, perf_counter()


@dataclass(frozen=True)
class Record:
    """One collective from the view of one rank.

    Attributes:
        op: Name of the collective, for example `all_gather`.
        axis: Name of its axis.
        size: Number of ranks of the axis.
        moved: Number of elements that must cross this rank's link with any algorithm: received
            (all-gather, broadcast) or sent (reduce, reduce-scatter), and an all-reduce does both.
            The root of a broadcast and of a reduce moves nothing. If messages differ in size
            (all-to-all, scatter, gather, exchange), the larger of what it sends and receives.
        itemsize: Bytes per element.
        label: Purpose of the message.
        targets: Global ranks that receive something from this rank, itself included.
        timing: When it happened.
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
        """The bytes that this rank moved."""
        return self.moved * self.itemsize


@dataclass
class Recorder:
    """The records that were made while `record_messages()` was open, in order."""

    records: list[Record] = field(default_factory=list)

    def moved(self, label: str = "", axis: str = "") -> float:
        """The number of elements that this rank moved over an axis, or over all of them.

        It counts the records whose label starts with `label`.
        """
        return sum(r.moved for r in self._select(label, axis))

    def bytes(self, label: str = "", axis: str = "") -> float:
        """Like `moved`, in bytes."""
        return sum(r.bytes for r in self._select(label, axis))

    def count(self, label: str = "", axis: str = "") -> Counter[str]:
        """The number of collectives of each kind; arguments as in `moved`."""
        return Counter(r.op for r in self._select(label, axis))

    def _select(self, label: str, axis: str) -> Iterator[Record]:
        return (
            r for r in self.records if r.label.startswith(label) and (not axis or r.axis == axis)
        )


# The object that is told when the process begins to wait for a message and when the message ends.
Noted = Timing | progress.Posted | None

recorders: list[Recorder] = []  # those that are open


@contextmanager
def record_messages() -> Iterator[Recorder]:
    """Records the collectives issued inside the block, including those of backward passes."""
    recorder = Recorder()
    recorders.append(recorder)
    try:
        yield recorder
    finally:
        recorders.remove(recorder)


def note(
    op: str,
    axis: Axis,
    moved: float,
    x: Tensor,
    label: str,
    targets: Targets = "all",
    n: int = 1,
    equal: bool = True,
    peer: int = -1,
) -> Noted:
    """Adds a message of n tensors like x to all open recorders, and notes that it is started.

    Callers may leave it out if there is no recorder and the process is not watched.

    Args:
        targets: Indices along the axis of the ranks that receive something from this rank.
        equal: Whether all ranks of the axis must agree on its size.
        peer: Index along the axis of the only other rank, for a message between two.
    """
    timing = None
    if recorders:
        ranks = axis.ranks
        to = ranks if targets == "all" else tuple(ranks[i] for i in targets)
        timing = Timing(perf_counter())
        for recorder in recorders:
            recorder.records.append(
                Record(op, axis.name, axis.size, moved, x.element_size(), label, to, timing)
            )
    watched = progress.active
    if watched is None:
        return timing
    return watched.posted(op, axis, label, n * x.numel() if equal else -1, peer, timing)
