"""Repeats the products over chunks or panels in the log of memory, without moving them again.

Such a product runs once for each shape of its operands (and once more if it allocates a workspace
that stays), and its log is played again after that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from gridformer.memory.tape import Numbers, Step, steps_of
from gridformer.memory.tracker import Entry, MemoryTracker
from gridformer.mesh import groups
from gridformer.trace.repeated_products import (
    Made,
    NotRepeatableError,
    Playing,
    Recording,
    RepeatedProducts,
)
from gridformer.trace.shape import Shape

_Part = Sequence[Step]


class _Recording(Recording[_Part]):
    def __init__(self, tracker: MemoryTracker) -> None:
        self._tracker, self._numbers = tracker, Numbers()
        self._begin = 0
        self._ended: set[int] = set()
        self._handed_in = 0

    def hand_in(self, x: Tensor) -> None:
        entry = self._tracker.entry_of(x)
        assert entry is not None
        self._numbers.add(entry)
        self._handed_in += 1

    def begin(self) -> None:
        self._begin = len(self._tracker.changes)

    def end(self) -> _Part:
        steps = steps_of(self._tracker.changes[self._begin :], self._numbers)
        if any(step.what in ("at", "tick") for step in steps):
            raise NotRepeatableError("a place begins, or something of other code ends")
        self._ended |= {step.number for step in steps if step.what == "end"}
        return steps

    def made(self, x: Tensor) -> Made:
        entry = self._tracker.entry_of(x)
        number = None if entry is None else self._numbers[entry]
        if number is None or number in self._ended:
            raise NotRepeatableError("the result was not made here")
        return Made(number, Shape.of(x))

    def complete(self, handed_out: Sequence[Made]) -> None:
        kept = {made.number for made in handed_out}
        others = {*range(self._handed_in, len(self._numbers.entries))}
        if len(kept) < len(handed_out) or not others <= self._ended | kept:
            raise NotRepeatableError("something besides the results stays")


class _Playing(Playing[_Part]):
    def __init__(self, tracker: MemoryTracker) -> None:
        self._tracker = tracker
        self._entries: list[Entry] = []
        self._held: dict[int, Tensor] = {}
        self._handed_in: dict[int, Tensor] = {}

    def hand_in(self, x: Tensor) -> None:
        entry = self._tracker.entry_of(x)
        assert entry is not None
        self._handed_in[len(self._entries)] = x
        self._entries.append(entry)

    def play(self, part: _Part, made: Collection[Made]) -> None:
        tracker, shapes = self._tracker, {one.number: one.shape for one in made}
        for what, number, n_bytes, text, _ in part:
            if what == "begin" and number in shapes:
                self._held[number] = x = shapes[number].make()
                entry = tracker.entry_of(x)
                assert entry is not None
                self._entries.append(entry)
            elif what == "begin":
                self._entries.append(tracker.begin(n_bytes, text))
            elif what == "end" and number in self._handed_in:
                del self._handed_in[number]
                if self._entries[number].died is None:
                    raise NotRepeatableError(f"{self._entries[number]} is held by other code")
            elif what == "end":
                tracker.end(self._entries[number])
            else:
                tracker.become(self._entries[number], text)

    def take(self, made: Made) -> Tensor:
        return self._held.pop(made.number)


@contextmanager
def products_once(tracker: MemoryTracker) -> Iterator[None]:
    """Lets products run once for each shape of their operands, inside the context.

    Args:
        tracker: Keeps the log, in which all products appear.
    """
    recording, playing = partial(_Recording, tracker), partial(_Playing, tracker)
    with RepeatedProducts(recording, playing, _possible)():
        yield


def _possible(name: str, schedule: Any) -> bool:
    """Whether a product lets go of its operands when it returns, like one that is repeated.

    Over gloo a sum of blocks reads them once more while somebody waits for it.
    """
    return name != "sum_of_blocks" or groups.over_nccl(schedule.row.group)
