"""Counts messages: while a recorder is open, every collective of the package is recorded here.

The same call also tells `gridformer.comm.progress` where the process is, and its watch reads that.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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

    Times are in seconds of this process's performance counter. With a GPU they are those of the
    host, and the device may be behind.
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
        moved: Number of elements that must cross this rank's link with any algorithm. They are
            received (all-gather, broadcast) or sent (reduce, reduce-scatter), and an all-reduce
            does both. These are the volumes of ring and pipelined algorithms, so the root of a
            broadcast and of a reduce moves nothing. If messages differ in size (all-to-all,
            scatter, gather, exchange), it is the larger of what this rank sends and receives.
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
        """The number of elements that this rank moved.

        Args:
            label: Count only records whose label starts with this.
            axis: Count only records of this axis; an empty name means all axes.
        """
        return sum(r.moved for r in self._select(label, axis))

    def bytes(self, label: str = "", axis: str = "") -> float:
        """Like `moved`, in bytes."""
        return sum(r.moved * r.itemsize for r in self._select(label, axis))

    def count(self, label: str = "", axis: str = "") -> Counter[str]:
        """The number of collectives of each kind; arguments as in `moved`."""
        return Counter(r.op for r in self._select(label, axis))

    def messages(self, rank: int, units: Sequence[int], label: str = "") -> list[int]:
        """Counts the messages of `rank`, whose records these are, by the level of the network.

        There is one message for each rank that receives something from this rank, itself included
        (as Jain et al. 2021 count them).

        Args:
            rank: Global rank.
            units: Numbers of consecutive ranks in a unit of each level, the smallest first, such as
                on a node and in a rack.
            label: Count only records whose label starts with this.

        Returns:
            For each level the number of messages that stay within one unit of this level but leave
            the unit of the level below, and last the number of messages that leave the largest
            unit.
        """
        targets = [target for r in self._select(label, "") for target in r.targets]
        within = [sum(target // k == rank // k for target in targets) for k in units]
        return [b - a for a, b in itertools.pairwise([0, *within, len(targets)])]

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
        op, axis, moved, label: See `Record`.
        x: A tensor of the message.
        targets: Indices along the axis of the ranks that receive something from this rank.
        n: How many tensors like x the message has.
        equal: Whether all ranks of the axis must agree on its size.
        peer: Index along the axis of the only other rank, for a message between two.

    Returns:
        The object whose `wait` and `end` the caller calls when it begins to wait and when the
        collective ends. None if nobody records.
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
