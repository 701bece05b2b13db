"""Traces the products over chunks or panels once for each shape of their operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from gridformer.trace.events import Event, Kernel, Place, Start, Wait
from gridformer.trace.group import Log
from gridformer.trace.repeated_products import (
    Made,
    NotRepeatableError,
    Playing,
    Recording,
    RepeatedProducts,
)
from gridformer.trace.shape import Shape

Count = Callable[[int], int]


@dataclass
class _Part:
    """What a product has done, or a wait for one of its results.

    Attributes:
        events: Its events.
        products: The number of its matrix products.
        caller: The place that has called it.
        elsewhere: The same events at other places, by the caller and the place of kernels there.
    """

    events: Sequence[Event]
    products: int
    caller: Place
    elsewhere: dict[tuple[Place, Place], list[Event]] = field(default_factory=dict)

    def at(self, caller: Place, kernels: Place) -> list[Event]:
        """Returns its events elsewhere.

        Args:
            caller: The place that calls it there.
            kernels: The place of kernels there.
        """
        key = caller, kernels
        if key not in self.elsewhere:
            self.elsewhere[key] = [
                event._replace(place=kernels)
                if isinstance(event, Kernel)
                else event._replace(place=self._moved(event.place, caller))
                for event in self.events
                if isinstance(event, Start | Wait | Kernel)
            ]
        return self.elsewhere[key]

    def _moved(self, place: Place, caller: Place) -> Place:
        return caller if place == self.caller else place.like(caller)


class _Recording(Recording[_Part]):
    def __init__(self, log: Log, count: Count) -> None:
        self._log, self._count = log, count
        self._started: set[int] = set()

    def hand_in(self, x: Tensor) -> None:
        pass  # what is freed is not in the log

    def begin(self) -> None:
        trace = self._log.trace
        self._begin = len(trace.events), self._count(0)
        self._others = len(trace.reads), len(trace.troubles), self._log.muted
        self._caller = self._log.places.here()

    def end(self) -> _Part:
        trace, (begin, products) = self._log.trace, self._begin
        if self._others != (len(trace.reads), len(trace.troubles), False):
            raise NotRepeatableError("something besides messages and kernels")
        events = trace.events[begin:]
        self._started |= {event.number for event in events if isinstance(event, Start)}
        for event in events:
            if isinstance(event, Wait):
                if event.number not in self._started:
                    raise NotRepeatableError("a wait for the message of others")
                self._started.remove(event.number)
        return _Part(events, self._count(0) - products, self._caller)

    def made(self, x: Tensor) -> Made:
        return Made(0, Shape.of(x))

    def complete(self, handed_out: Sequence[Made]) -> None:
        if self._started:
            raise NotRepeatableError("others wait for its messages")


class _Playing(Playing[_Part]):
    def __init__(self, log: Log, count: Count) -> None:
        self._log, self._count = log, count
        self._numbers: dict[int, int] = {}

    def hand_in(self, x: Tensor) -> None:
        pass

    def play(self, part: _Part, made: Sequence[Made]) -> None:
        caller = kernels = self._log.places.here()
        if self._log.kernels:
            kernels = self._log.places.of_kernel()
        self._log.repeat(part.at(caller, kernels), self._numbers)
        self._count(part.products)

    def take(self, made: Made) -> Tensor:
        muted, self._log.muted = self._log.muted, True
        try:
            return made.shape.make()
        finally:
            self._log.muted = muted


@contextmanager
def products_once(log: Log, count: Count) -> Iterator[None]:
    """Lets products run once for each shape of their operands, inside the context.

    Args:
        log: The log of the rank.
        count: Adds to the number of matrix products so far, and returns it.
    """
    repeated = RepeatedProducts(lambda: _Recording(log, count), lambda: _Playing(log, count))
    with repeated():
        yield
