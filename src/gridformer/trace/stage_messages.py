"""Repeats the messages between the stages of a pipeline where a pass does not run.

The pipeline's own code still says when which rank sends what. But equal messages leave equal
records, so the code that sends one runs once for each kind. And passes that do not run share their
tensors, which have no memory anyway; those of passes that run are their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor

from gridformer.comm.collectives import Pending
from gridformer.parallel.pipeline import Executor
from gridformer.parallel.pipeline.schedules import Action
from gridformer.trace.events import Event, Place, Start, Wait
from gridformer.trace.group import Log
from gridformer.trace.recorded_pass import EmptyLike
from gridformer.utils.batch import Batch


class StageMessages:
    """Takes the place of some functions of an executor, of its channel and of its stage inputs.

    Args:
        executor: The executor.
        log: The log of the rank.
        run: The actions whose passes run.

    Attributes:
        replaced: The owners of these functions, their names, and what takes their place.
    """

    def __init__(self, executor: Executor, log: Log, run: Collection[Action]) -> None:
        self.log, self.stage_io, self._run = log, executor.stage_io, run
        self._send, self._receive = executor.channel.send, executor.channel.receive
        self._real_inputs, self._real_enter = executor.empty_inputs, executor.enter
        self._real_slice, self._real_buffer = self.stage_io.slice, self.stage_io.receive_buffer
        self._real_fill = self.stage_io.fill
        self._known: dict[Any, _Known | None] = {}
        self._filled: dict[Any, tuple[Event, ...]] = {}
        self._empty: dict[EmptyLike, Tensor] = {}
        self._parts: dict[tuple[str, int], Tensor] = {}  # of shared tensors, by their ids
        self._inputs: dict[Any, dict[str, Tensor]] = {}
        self._shared: dict[int, Tensor] = {}  # tensors of passes that do not run, by their ids
        self.replaced: list[tuple[Any, str, Any]] = [
            (executor, "empty_inputs", self.empty_inputs),
            (executor, "enter", self.enter),
            (executor.channel, "send", self.send),
            (executor.channel, "receive", self.receive),
            (self.stage_io, "slice", self.slice),
            (self.stage_io, "receive_buffer", self.receive_buffer),
            (self.stage_io, "fill", self.fill),
        ]

    def empty(self, like: EmptyLike) -> Tensor:
        """Returns the result of a pass that does not run."""
        if like not in self._empty:
            self._empty[like] = made = like.empty()
            self._shared[id(made)] = made
        return self._empty[like]

    def send(self, x: Tensor, to: int, label: str = "") -> Any:
        """Takes the place of `P2PChannel.send`."""
        return self._message(self._send, x, to, label)

    def receive(self, out: Tensor, source: int, label: str = "") -> Any:
        """Takes the place of `P2PChannel.receive`."""
        return self._message(self._receive, out, source, label)

    def _message(self, real: Any, x: Tensor, peer: int, label: str) -> Any:
        if id(x) not in self._shared:
            return real(x, peer, label)
        key = real.__name__, peer, label, x.shape, x.dtype
        events = self.log.trace.events
        if key not in self._known:
            before = len(events)
            pending: Pending = real(x, peer, label)
            only = events[before] if len(events) == before + 1 else None
            # On a CPU there may be copies, too.
            self._known[key] = _Known(only) if isinstance(only, Start) else None
            return _First(self.log, pending, self._known[key])
        known = self._known[key]
        if known is None:
            return real(x, peer, label)
        number = self.log.next_number()
        events.append(known.start.numbered(number))
        return _Again(self.log, number, known, x)

    def empty_inputs(self, action: Action, batch: Batch) -> dict[str, Tensor]:
        """Takes the place of `Executor.empty_inputs`."""
        if action in self._run:
            return self._real_inputs(action, batch)
        key = action.kind, action.stage, *(x.shape for x in batch.values())
        if key not in self._inputs:
            self._inputs[key] = self._real_inputs(action, batch)
            self._shared |= {id(x): x for x in self._inputs[key].values()}
        return dict(self._inputs[key])

    def enter(
        self, action: Action, entered: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Takes the place of `Executor.enter`."""
        if action in self._run:
            return self._real_enter(action, entered)
        return dict(entered), entered

    def slice(self, x: Tensor) -> Tensor:
        """Takes the place of `StageIO.slice`."""
        return self._part(self._real_slice, x)

    def receive_buffer(self, x: Tensor) -> Tensor:
        """Takes the place of `StageIO.receive_buffer`."""
        return self._part(self._real_buffer, x)

    def fill(self, x: Tensor, received: Tensor) -> None:
        """Takes the place of `StageIO.fill`, which may gather slices and copy them."""
        key = x.shape, x.dtype, received.shape
        events = self.log.trace.events
        if key not in self._filled:
            before = len(events)
            self._real_fill(x, received)
            self._filled[key] = tuple(events[before:])
            return
        self.log.repeat(self._filled[key], {})

    def _part(self, real: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Returns a part of a tensor; that of a shared tensor is made once."""
        if id(x) not in self._shared:
            return real(x)
        key = real.__name__, id(x)
        if key not in self._parts:
            self._parts[key] = made = real(x)
            self._shared[id(made)] = made
        return self._parts[key]


class _Known:
    """A message that was recorded, and where it is waited for, as soon as that is known."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.place: Place | None = None


class _First:
    """The first message of a kind. Its wait shows where the others are waited for."""

    def __init__(self, log: Log, pending: Pending, known: _Known | None) -> None:
        self._log, self._pending, self._known = log, pending, known

    def wait(self) -> Tensor:
        events = self._log.trace.events
        before = len(events)
        found = self._pending.wait()
        if self._known is not None and len(events) > before:
            wait = events[-1]
            assert isinstance(wait, Wait)
            self._known.place = wait.place
        return found


class _Again:
    """A message like one that was recorded."""

    def __init__(self, log: Log, number: int, known: _Known, x: Tensor) -> None:
        self._log, self._number, self._known, self._x = log, number, known, x

    def wait(self) -> Tensor:
        if self._number:
            place = self._known.place or self._log.places.here()
            self._log.trace.events.append(Wait(self._number, place))
            self._number = 0
        return self._x
