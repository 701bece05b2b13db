"""Turns the trace of a rank into what a replay needs: kernels and messages with their times."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from gridformer.trace.events import Event, Kernel, Place, Start, Trace, Wait

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
        start: The message.
        seconds: What it takes once it is next on all its members.
        phase: The phase of the step.
    """

    start: Start
    seconds: float
    phase: Phase


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


Item = Run | Send | Await | ReadBack


@dataclass
class Program:
    """What one rank does.

    Attributes:
        rank: The rank.
        items: Kernels, messages, waits and read-backs, in order.
    """

    rank: int
    items: list[Item] = field(default_factory=list)


def phases_of(trace: Trace) -> list[Phase]:
    """Returns the phase of each event of a trace."""
    found: list[Phase] = []
    for number, event in enumerate(trace.events):
        if number >= trace.update > 0:
            found.append("update")
        else:
            found.append("backward" if event.place.backward else "forward")
    return found


def layers_only(events: Sequence[Event]) -> list[bool]:
    """Returns which events belong to the layers of a transformer, and to messages between them."""
    kept: set[int] = set()
    found = []
    for event in events:
        if isinstance(event, Wait):
            found.append(event.number in kept)
            continue
        inside = in_layers(event.place)
        if isinstance(event, Start):
            inside = inside or event.label == _PIPELINE
            if inside:
                kept.add(event.number)
        elif isinstance(event, Kernel):
            inside = inside and not event.update
        found.append(inside)
    return found


def in_layers(place: Place) -> bool:
    """Returns whether a place is in a layer of a transformer."""
    return _LAYER.search(place.module) is not None
