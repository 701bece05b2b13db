"""Turns the trace of a rank into what a replay needs: kernels and messages with their times."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from gridformer.record.events import Kernel, Place, Read, Start, Wait

Phase = Literal["forward", "backward", "update"]
_LAYER = re.compile(r"(^|\.)(\w*layers|\w*blocks)\.\d+(\.|$)")
_PIPELINE = "pipeline"  # the label of messages between stages


class Run(NamedTuple):
    """A kernel.

    Attributes:
        seconds: What it takes on the device.
        launches: How often the host launches something for it.
        part: What its time counts as: `products`, `attention`, `memory_bound` or `update`.
        name: Its operator.
        module: The module of the model.
        phase: The phase of the step.
    """

    seconds: float
    launches: int
    part: str
    name: str
    module: str
    phase: Phase


class Send(NamedTuple):
    """A message is started; see `Start`.

    Attributes:
        number: Identifies the message on its rank.
        start: The message; its own number does not count.
        seconds: What it takes once it is next on all its members.
        phase: The phase of the step.
        cpu: On CPUs, for a message between nodes, the seconds in which it keeps a thread busy; None
            if it does so all the time, as a message within a node.
    """

    number: int
    start: Start
    seconds: float
    phase: Phase
    cpu: float | None = None


class Await(NamedTuple):
    """The compute stream waits for a message.

    Attributes:
        number: The number of the message.
        phase: The phase of the step.
    """

    number: int
    phase: Phase


class ReadBack(NamedTuple):
    """The host waits for the compute stream."""

    phase: Phase


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A pass that depends on no other rank, replayed beforehand; see `gridformer.plan.blocks`.

    Attributes:
        name: What it is.
        ahead: Seconds from its beginning to its end if the host is far ahead of the device.
        behind: Seconds from when the host comes to it until its end if the device is idle.
        host: Seconds that the host needs for it.
        launches: How many launches it has.
        spent_ahead: What the time is spent on in the first case.
        spent_behind: What it is spent on in the second case.
        phases: The share of each phase of the step.
    """

    name: str
    ahead: float
    behind: float
    host: float
    launches: int
    spent_ahead: Spent
    spent_behind: Spent
    phases: dict[str, float]


Item = Run | Send | Await | ReadBack | Block


class Interval(NamedTuple):
    """Something that a rank does.

    Attributes:
        stream: `compute`, or `messages AXIS`.
        kind: What it counts as.
        name: What it is.
        start: When it begins, in seconds.
        end: When it ends, in seconds.
        module: The module of the model.
    """

    stream: str
    kind: str
    name: str
    start: float
    end: float
    module: str = ""


@dataclass
class Spent:
    """What the time of one rank was spent on, in seconds.

    Attributes:
        rank: The rank.
        end: When it comes to its end.
        work: The time of kernels: products, attention, memory_bound, update.
        launches: The time in which the device waits for the host.
        bubble: The time in which it waits for other ranks to start their part of a message.
        late: The same by phase.
        exposed: The time in which it waits for messages that travel, by axis.
        messages: The time that messages travel, by axis.
        phases: All time by phase.
        n_launches: How many kernels are launched.
        intervals: What it does when, if this was asked for.
    """

    rank: int
    end: float = 0.0
    work: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    launches: float = 0.0
    bubble: float = 0.0
    late: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    exposed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    messages: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    phases: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    n_launches: int = 0
    intervals: list[Interval] = field(default_factory=list)

    @property
    def passes_end(self) -> float:
        """When its last pass ends, and the update begins."""
        return self.end - self.phases.get("update", 0.0)

    @property
    def busy(self) -> float:
        """All of it except for waiting for the host."""
        return sum(self.work.values()) + self.bubble + sum(self.exposed.values())


@dataclass
class Program:
    """What one rank does.

    Attributes:
        rank: The rank.
        items: Kernels, messages, waits and read-backs, in order.
    """

    rank: int
    items: list[Item] = field(default_factory=list)


class OnlyLayers:
    """Selects what belongs to the layers of a transformer, and the messages between its stages."""

    def __init__(self) -> None:
        self._kept: set[int] = set()

    def keeps(self, event: Start | Wait | Kernel | Read) -> bool:
        """Returns whether an event counts. Ask for the events of a rank in order."""
        if isinstance(event, Wait):
            return event.number in self._kept
        inside = in_layers(event.place)
        if isinstance(event, Start):
            inside = inside or event.label == _PIPELINE
            if inside:
                self._kept.add(event.number)
        elif isinstance(event, Kernel):
            inside = inside and not event.update
        return inside


def in_layers(place: Place) -> bool:
    """Returns whether a place is in a layer of a transformer."""
    return _LAYER.search(place.module) is not None
