"""Where a process is among its messages, written where another process can read it.

A process that hangs in a message, or that was stopped, cannot say where it is. So each message
writes a few numbers to a small file in memory: how many messages this process has started and ended
with each group, what they are, and for which one it waits. This takes less than a microsecond per
message. Other processes on this machine can read the file even while this process is stopped
(`gridformer.launch.watch`).

Messages are counted in *lanes*: one for the collectives of a group, one for the messages to and one
for those from each other rank. Ranks start the messages of a lane in the same order, so a rank has
arrived at a message when it has started as many. Over gloo a message has ended when its result is
there. Over NCCL it ends on the GPU, which the host does not notice: `ended` then says only that the
host has gone on.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from gridformer.comm.progress_file import (
    BEAT,
    COLLECTIVE,
    EXCHANGE,
    LANE,
    LANES,
    LENGTH,
    MAGIC,
    MAGIC_AT,
    MOST_LANES,
    NAMES,
    NAMES_LENGTH,
    PID,
    RECEIVE,
    SEND,
    SINCE,
    STACK,
    STACK_AT,
    STACK_LENGTH,
    STEP,
    WORDS,
    State,
    state_of,
)
from gridformer.mesh.axes import Axis
from gridformer.utils.files import writing

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from gridformer.comm.recorder import Timing

_KINDS = {"exchange": EXCHANGE, "send": SEND, "recv": RECEIVE}

# Functions that write several words at once, which is faster than word by word.
_put_wait = struct.Struct("4q").pack_into  # LANE, NUMBER, SITE, SINCE
_put_two = struct.Struct("2q").pack_into


class Posted:
    """One message that was started. `wait` and `end` are those of a `Timing`.

    After `end` the object is reused: creating a new one would take as long as everything else.
    """

    __slots__ = ("_at", "_ended", "_site", "_view", "number", "timing")

    def __init__(self, view: memoryview[int], site: _Site) -> None:
        self._view, self._site = view, site
        self._at, self._ended = site.lane, site.lane + 1
        self.number = 0
        self.timing: Timing | None = None

    def started(self) -> None:
        """Notes that the call that starts the message has returned."""
        self._view[1] = 0

    def wait(self) -> None:
        """Notes that the process begins to wait for the message."""
        _put_wait(self._view, 8, self._at, self.number, self._site.number, monotonic_ns())
        if self.timing is not None:
            self.timing.wait()

    def end(self) -> None:
        """Notes that the process has the result."""
        view = self._view
        view[1] = 0
        view[self._ended] += 1
        if self.timing is not None:
            self.timing.end()
        self._site.free = self


class _Site:
    """A place in the program that starts messages, and where its lane begins in the file.

    It keeps the group, so that its id stays unique.
    """

    __slots__ = ("free", "group", "lane", "number")

    def __init__(self, number: int, lane: int, group: ProcessGroup | None) -> None:
        self.number, self.lane, self.group = number, lane, group
        self.free: Posted | None = None  # one that has ended


class Progress:
    """Writes where this process is among its messages.

    Args:
        path: The file to write; None keeps it in memory, where other processes of this user find it
            at `path` as long as this process lives.

    Attributes:
        path: Where other processes of this machine read it; None where the system has no such
            place.
    """

    def __init__(self, path: Path | None) -> None:
        if path is not None:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self.path: Path | None = path
        elif sys.platform == "linux":
            file = os.memfd_create("gridformer-progress", os.MFD_CLOEXEC)
            self.path = Path(f"/proc/{os.getpid()}/fd/{file}")
        else:
            file, self.path = -1, None
        if file >= 0:
            with writing(self.path or Path(), LENGTH):
                os.ftruncate(file, LENGTH)
        self._bytes = mmap.mmap(file, LENGTH)
        if path is not None:
            os.close(file)
        self.waits = 0  # how often `waits_on_purpose` was called
        self._view: memoryview[int] = memoryview(self._bytes).cast("q")
        self._lanes: dict[tuple[str, str, int], int] = {}  # where each begins
        self._sites: dict[tuple[str, int, str, str, int], _Site] = {}
        self._view[PID] = os.getpid()
        self._view[MAGIC_AT] = MAGIC

    def posted(
        self, op: str, axis: Axis, label: str, size: int, peer: int, timing: Timing | None
    ) -> Posted:
        """Notes that the process starts a message, in which it may wait.

        Args:
            size: Number of elements, which must be equal on all ranks; -1 if it need not be.
            peer: Index along the axis of the only other rank; -1 for a collective.
            timing: A `Timing` to which `wait` and `end` are passed on; None if there is none.
        """
        site = self._sites.get((axis.name, id(axis.group), op, label, peer))
        if site is None:
            site = self._new_site(op, axis, label, peer)
        at, number, view = site.lane, site.number, self._view
        count = view[at] + 1
        _put_two(view, 8 * at + 16 + 16 * (count & 7), number, size)
        view[at] = count
        _put_wait(view, 8, at, count, number, monotonic_ns())
        posted, site.free = site.free or Posted(view, site), None
        posted.number, posted.timing = count, timing
        return posted

    def beat(self) -> None:
        """Notes a heartbeat of this process's watch."""
        self._view[BEAT] = monotonic_ns()

    def put_stack(self, text: str) -> None:
        """Keeps the stack of this process for those who read its file."""
        data = text.encode()[: NAMES - STACK]
        self._bytes[STACK : STACK + len(data)] = data
        self._view[STACK_LENGTH], self._view[STACK_AT] = len(data), monotonic_ns()

    def waited_s(self) -> float:
        """Returns for how many seconds the process has waited for a message; 0 if it does not."""
        view = self._view
        since = view[SINCE]
        return (monotonic_ns() - since) / 1e9 if view[LANE] else 0.0

    def noted(self) -> tuple[int, ...]:
        """Returns numbers that are others once a step or a message has begun."""
        return self.waits, self._view[STEP], self._view[SINCE]

    def read(self) -> State:
        """Returns the state that the file records."""
        return state_of(self._bytes)

    def _new_site(self, op: str, axis: Axis, label: str, peer: int) -> _Site:
        kind = _KINDS.get(op, COLLECTIVE)
        import torch.distributed as dist

        # The name of a group is the same on all of its ranks.
        name = str(getattr(axis.group or dist.group.WORLD, "group_name", "world"))
        key = (name, kind, peer)
        lane = self._lanes.get(key)
        if lane is None:
            # All lanes beyond the last share it. No run has that many.
            place = min(len(self._lanes), MOST_LANES - 1)
            lane = self._lanes[key] = LANES + place * WORDS
            ranks = axis.ranks
            named = {"group": key[0], "kind": kind, "peer": ranks[peer] if peer >= 0 else -1}
            self._name({"lane": lane, "ranks": ranks, **named})
        site = _Site(len(self._sites) + 1, lane, axis.group)
        self._sites[axis.name, id(axis.group), op, label, peer] = site
        self._name({"site": site.number, "op": op, "axis": axis.name, "label": label})
        return site

    def _name(self, what: dict[str, Any]) -> None:
        """Adds a line to the names; a line that no longer fits is left out."""
        line = json.dumps(what).encode() + b"\n"
        begin = NAMES + self._view[NAMES_LENGTH]
        if begin + len(line) <= LENGTH:
            self._bytes[begin : begin + len(line)] = line
            self._view[NAMES_LENGTH] += len(line)


active: Progress | None = None  # that of this process, if it is watched


def start(path: Path | None) -> Progress:
    """Starts to note the messages of this process; see `Progress`."""
    global active
    active = Progress(path)
    return active


def stop() -> None:
    """Ends noting the messages of this process."""
    global active
    active = None


def at_step(step: int) -> None:
    """Notes the step that begins, counted from 1, if this process is watched."""
    if active is not None:
        active._view[STEP] = step


def waits_on_purpose() -> None:
    """Notes that this process waits for something else than a message, and is not stuck."""
    if active is not None:
        active.waits += 1


def flight_records() -> Any:
    """Returns torch's records of messages that NCCL has not finished; None if it keeps none."""
    import torch

    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):  # older and newer torch
        if dump := getattr(torch._C._distributed_c10d, name, None):
            with suppress(Exception):
                return json.loads(dump(includeCollectives=True, onlyActive=True))
    return None
