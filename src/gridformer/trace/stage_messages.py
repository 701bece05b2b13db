"""Repeats the messages between the stages of a pipeline, most of them only where no pass runs.

The pipeline's own code still says when which rank sends what. But equal messages leave equal
records, so the code that sends one runs once for each kind, and the tensors are the same ones each
time: they have no memory anyway.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gridformer.comm.collectives import Pending
from gridformer.parallel.pipeline import Executor
from gridformer.trace.events import Event, Place, Start, Wait
from gridformer.trace.group import Log
from gridformer.utils.batch import Batch


class StageMessages:
    """Takes the place of some functions of an executor's channel and of its stage inputs.

    Args:
        executor: The executor.
        log: The log of the rank.

    Attributes:
        sending: What can be replaced where no pass runs: the owners of functions, their names, and
            what takes their place.
        filling: What can be replaced where passes run, too.
    """

    def __init__(self, executor: Executor, log: Log) -> None:
        self.log, self.stage_io = log, executor.stage_io
        self._send, self._receive = executor.channel.send, executor.channel.receive
        self._real_entering = executor.stage_io.entering
        self._real_slice, self._real_buffer = self.stage_io.slice, self.stage_io.receive_buffer
        self._real_fill = self.stage_io.fill
        self._known: dict[Any, _Known | None] = {}
        self._filled: dict[Any, tuple[Event, ...]] = {}
        self._tensors: dict[Any, Any] = {}
        self.sending: list[tuple[Any, str, Any]] = [
            (executor.channel, "send", self.send),
            (executor.channel, "receive", self.receive),
            (self.stage_io, "entering", self.entering),
            (self.stage_io, "slice", self.slice),
            (self.stage_io, "receive_buffer", self.receive_buffer),
        ]
        self.filling: list[tuple[Any, str, Any]] = [(self.stage_io, "fill", self.fill)]

    def send(self, x: Tensor, to: int, label: str = "") -> Any:
        """Takes the place of `P2PChannel.send`."""
        return self._message(self._send, x, to, label)

    def receive(self, out: Tensor, source: int, label: str = "") -> Any:
        """Takes the place of `P2PChannel.receive`."""
        return self._message(self._receive, out, source, label)

    def _message(self, real: Any, x: Tensor, peer: int, label: str) -> Any:
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

    def entering(self, stage: int, batch: Batch) -> dict[str, Tensor]:
        """Takes the place of `StageIO.entering`."""
        key = stage, *(x.shape for x in batch.values())
        if key not in self._tensors:
            self._tensors[key] = self._real_entering(stage, batch)
        return dict(self._tensors[key])

    def slice(self, x: Tensor) -> Tensor:
        """Takes the place of `StageIO.slice`."""
        return self._made(self._real_slice, x)

    def receive_buffer(self, x: Tensor) -> Tensor:
        """Takes the place of `StageIO.receive_buffer`."""
        return self._made(self._real_buffer, x)

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

    def _made(self, real: Any, x: Tensor) -> Tensor:
        key = real.__name__, x.shape, x.dtype, x.device
        if key not in self._tensors:
            self._tensors[key] = real(x)
        found: Tensor = self._tensors[key]
        return found


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
