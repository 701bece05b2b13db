"""A part of the log of memory that is played again, for work that a step repeats.

A part can be played again if it depends on nothing outside it: it frees only what it has made
itself or was handed in, and it hands out everything that it makes and does not free.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from gridformer.memory.tracker import Entry, MemoryChange, MemoryTracker
from gridformer.trace.repeated_products import NotRepeatableError
from gridformer.trace.shape import Shape


class Step(NamedTuple):
    """A change of the log, with a number for its storage.

    Attributes:
        what: `begin`, `end`, `kind`, `at` or `accumulated`, see `MemoryChange`; `tick` for a
            storage without bytes that other code owns, and `skip` for a number without a storage.
        number: The number of the storage.
        n_bytes: Its size.
        text: The kind or the place.
        flag: `in_backward` for `begin` and `until_backward` for `end`.
    """

    what: str
    number: int = 0
    n_bytes: int = 0
    text: str = ""
    flag: bool = False


class Numbers:
    """Numbers the storages of a part of the log: those that it makes, after those handed in."""

    def __init__(self, given: Sequence[Entry | None] = ()) -> None:
        self.entries: list[Entry | None] = [*given]
        self._of = {id(entry): number for number, entry in enumerate(given) if entry is not None}

    def __getitem__(self, entry: Entry) -> int | None:
        """Returns the number of a storage; None if it belongs to other code."""
        return self._of.get(id(entry))

    def add(self, entry: Entry) -> int:
        """Gives a new storage a number."""
        self.entries.append(entry)
        self._of[id(entry)] = len(self.entries) - 1
        return len(self.entries) - 1


def steps_of(changes: Sequence[MemoryChange], numbers: Numbers) -> list[Step]:
    """Returns changes of the log in a form that can be played.

    Args:
        changes: The changes.
        numbers: The numbers of storages; new storages get one.

    Raises:
        NotRepeatableError: Storages of other code are freed or get another kind.
    """
    found: list[Step] = []
    arriving = False  # what torch makes while it accumulates a gradient is left out
    gradient: Entry | None = None
    for what, entry, text in changes:
        if what == "gradient":
            arriving, gradient = True, entry
        elif what == "accumulated":
            arriving = False
            number = -1 if entry is None else numbers[entry]
            if number is None:
                raise NotRepeatableError("a gradient was not made here")
            found.append(Step(what, number, text=text))
        elif arriving:
            if what == "end":
                number = numbers[entry] if entry is not None and entry is gradient else None
                if number is None:
                    raise NotRepeatableError("hooks of parameters free memory")
                assert entry is not None
                found.append(Step(what, number, entry.n_bytes, text, entry.until_backward))
        elif entry is None:
            found.append(Step(what, text=text))
        elif what == "begin":
            number = numbers.add(entry)
            found.append(Step(what, number, entry.n_bytes, text, entry.in_backward))
        elif (number := numbers[entry]) is not None:
            found.append(Step(what, number, entry.n_bytes, text, entry.until_backward))
        elif what == "kind" and text == "parameters":
            pass  # a copy of weights that was made before, which others find as it is
        elif what == "end" and entry.n_bytes == 0:
            found.append(Step("tick"))
        else:
            raise NotRepeatableError(f"{what} of {entry} of other code")
    return found


def without_entries(steps: Sequence[Step], numbers: Collection[int]) -> list[Step]:
    """Returns steps without what they do to some of the storages, whose numbers remain."""
    found = []
    for step in steps:
        if step.what not in ("begin", "end", "kind") or step.number not in numbers:
            found.append(step)
        elif step.what == "begin":
            found.append(Step("skip", step.number))
    return found


class Player:
    """Plays parts of the log again.

    Args:
        tracker: Keeps the log.
        given: The tensors that are handed in, in the order of their numbers; None for those on the
            meta device. The player holds them until the log says that they are freed.
    """

    def __init__(self, tracker: MemoryTracker, given: Sequence[Tensor | None] = ()) -> None:
        self.tracker = tracker
        self.held = {number: x for number, x in enumerate(given) if x is not None}
        self._entries = [None if x is None else tracker.entry_of(x) for x in given]

    def play(
        self,
        steps: Sequence[Step],
        shapes: Mapping[int, Shape],
        complete: Callable[[int], None] | None = None,
    ) -> None:
        """Adds the steps to the log.

        Args:
            steps: The steps.
            shapes: The storages for which tensors are made, because they are handed out. They are
                put into `held`.
            complete: Called with the number of each parameter whose gradient is complete.

        Raises:
            NotRepeatableError: A tensor that the log frees here is held by other code.
        """
        tracker = self.tracker
        for what, number, n_bytes, text, flag in steps:
            if what == "begin":
                assert number == len(self._entries), "a part of the log is missing"
                if number in shapes:
                    self.held[number] = shapes[number].make()
                    entry = tracker.entry_of(self.held[number])
                    assert entry is not None
                    entry.in_backward, entry.kind = flag, text
                else:
                    entry = tracker.begin(n_bytes, text, flag)
                self._entries.append(entry)
            elif what == "skip":
                self._entries.append(None)
            elif what == "at":
                tracker.at(text)
            elif what == "tick":
                tracker.now += 1
            elif what == "accumulated":  # into the gradient of the first micro-batch
                if (entry := self._entries[number] if number >= 0 else None) is not None:
                    tracker.end(entry, not entry.in_backward)
                if complete is not None:
                    complete(int(text))
            else:
                entry = self._entries[number]
                assert entry is not None
                if what == "kind":
                    tracker.become(entry, text)
                elif number in self.held:
                    del self.held[number]
                    if entry.died is None:
                        raise NotRepeatableError(f"{entry} is held by other code")
                    entry.until_backward = flag
                else:
                    tracker.end(entry, flag)

    def end(self, numbers: Sequence[int]) -> None:
        """Frees storages that the log has begun and not ended."""
        for number in numbers:
            if (entry := self._entries[number]) is not None:
                self.tracker.end(entry)
