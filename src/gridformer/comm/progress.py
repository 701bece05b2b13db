"""Where a process is among its messages, written where another process can read it.

A process that hangs in a message, or that was stopped, cannot say where it is. So each message
writes a few numbers to a small file in memory: how many messages this process has started and ended
with each group, what they are, and for which one it waits. This takes less than a microsecond per
message. Other processes of this machine read the file, also of a stopped process
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
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from gridformer.mesh.axes import Axis

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from gridformer.comm.recorder import Timing

# The file holds int64 words: a header, lanes, and from _TEXTS on two texts.
_MAGIC = 0x6772696431
(
    _MAGIC_AT,
    _LANE,  # where the lane begins in which the process waits; 0 if it does not wait
    _NUMBER,  # number of the message in its lane for which it waits
    _SITE,  # what that message is
    _SINCE,  # since when it waits, in nanoseconds of the monotonic clock
    _BEAT,  # when its watch last looked
    _STEP,
    _PID,
    _STACK_AT,  # when its stack was last written
    _STACK_LENGTH,  # in bytes
    _NAMES_LENGTH,
) = range(11)
assert (_LANE, _SINCE) == (1, 4)  # literal numbers where each message comes by
_LANES = 16  # the word where lanes begin
_KEPT = 8  # so many messages of a lane are described, a power of 2
_WORDS = 2 + 2 * _KEPT  # numbers started and ended, and (site, size) of each kept one
_MOST_LANES = 512
_STACK = 8 * (_LANES + _MOST_LANES * _WORDS)  # where the stack begins, in bytes
_NAMES = _STACK + 32_768
_LENGTH = 8 << 20  # a sparse file: only what was written takes memory

COLLECTIVE, EXCHANGE, SEND, RECEIVE = "collective", "exchange", "send", "recv"
_KINDS = {"exchange": EXCHANGE, "send": SEND, "recv": RECEIVE}


# Functions that write several words at once, which is faster than word by word.
_put_wait = struct.Struct("4q").pack_into  # _LANE, _NUMBER, _SITE, _SINCE
_put_two = struct.Struct("2q").pack_into


class Posted:
    """One message that was started. `wait` and `end` are those of a `Timing`.

    After `end` it serves for another message, because a new object would take as long as the rest.
    """

    __slots__ = ("_at", "_ended", "_site", "_view", "number", "timing")

    def __init__(self, view: memoryview[int], site: _Site) -> None:
        self._view, self._site = view, site
        self._at, self._ended = site.lane.at, site.lane.at + 1
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


class _Lane:
    __slots__ = ("at", "started")

    def __init__(self, at: int) -> None:
        self.at, self.started = at, 0


class _Site:
    """One message of the program. It keeps the group, so that its id stays its own."""

    __slots__ = ("free", "group", "lane", "number")

    def __init__(self, number: int, lane: _Lane, group: ProcessGroup | None) -> None:
        self.number, self.lane, self.group = number, lane, group
        self.free: Posted | None = None  # one that has ended


class Progress:
    """What this process writes about its messages.

    Args:
        path: the file to write; None keeps it in memory, where other processes of this user find it
            at `path` as long as this process lives.

    Attributes:
        path: where other processes of this machine read it; None where the system has no such
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
            os.ftruncate(file, _LENGTH)
        self._bytes = mmap.mmap(file, _LENGTH)
        if path is not None:
            os.close(file)
        self._view: memoryview[int] = memoryview(self._bytes).cast("q")
        self._lanes: dict[tuple[str, str, int], _Lane] = {}
        self._sites: dict[tuple[str, int, str, str, int], _Site] = {}
        self._view[_PID] = os.getpid()
        self._view[_MAGIC_AT] = _MAGIC

    def posted(
        self, op: str, axis: Axis, label: str, size: int, peer: int, timing: Timing | None
    ) -> Posted:
        """Notes that the process starts a message, in which it may wait.

        Args:
            op, axis, label: see `gridformer.comm.recorder.Record`.
            size: number of elements, which must be equal on all ranks; -1 if it need not be.
            peer: index along the axis of the only other rank; -1 for a collective.
            timing: what is to be told the same.
        """
        site = self._sites.get((axis.name, id(axis.group), op, label, peer))
        if site is None:
            site = self._new_site(op, axis, label, peer)
        lane, number, view = site.lane, site.number, self._view
        lane.started = count = lane.started + 1
        at = lane.at
        _put_two(view, 8 * at + 16 + 16 * (count & 7), number, size)
        view[at] = count
        _put_wait(view, 8, at, count, number, monotonic_ns())
        found = site.free
        if found is None:
            found = Posted(view, site)
        else:
            site.free = None
        found.number, found.timing = count, timing
        return found

    def at_step(self, step: int) -> None:
        """Notes the step that begins, counted from 1."""
        self._view[_STEP] = step

    def beat(self) -> None:
        """Notes that the watch of this process looks now."""
        self._view[_BEAT] = monotonic_ns()

    def put_stack(self, text: str) -> None:
        """Keeps the stack of this process for those who read its file."""
        data = text.encode()[: _NAMES - _STACK]
        self._bytes[_STACK : _STACK + len(data)] = data
        self._view[_STACK_LENGTH], self._view[_STACK_AT] = len(data), monotonic_ns()

    def waited_s(self) -> float:
        """Returns for how many seconds the process has waited for a message; 0 if it does not."""
        view = self._view
        since = view[_SINCE]
        return (monotonic_ns() - since) / 1e9 if view[_LANE] else 0.0

    def read(self) -> State:
        """Returns what the file says."""
        return _state(self._bytes)

    def _new_site(self, op: str, axis: Axis, label: str, peer: int) -> _Site:
        kind = _KINDS.get(op, COLLECTIVE)
        key = (_group_name(axis.group), kind, peer)
        lane = self._lanes.get(key)
        if lane is None:
            # All lanes beyond the last share it. Nobody has so many.
            place = min(len(self._lanes), _MOST_LANES - 1)
            lane = self._lanes[key] = _Lane(_LANES + place * _WORDS)
            ranks = axis.ranks
            named = {"group": key[0], "kind": kind, "peer": ranks[peer] if peer >= 0 else -1}
            self._name({"lane": lane.at, "ranks": ranks, **named})
        site = _Site(len(self._sites) + 1, lane, axis.group)
        self._sites[axis.name, id(axis.group), op, label, peer] = site
        self._name({"site": site.number, "op": op, "axis": axis.name, "label": label})
        return site

    def _name(self, what: dict[str, Any]) -> None:
        """Adds a line to the names; what does not fit remains without."""
        line = json.dumps(what).encode() + b"\n"
        begin = _NAMES + self._view[_NAMES_LENGTH]
        if begin + len(line) <= _LENGTH:
            self._bytes[begin : begin + len(line)] = line
            self._view[_NAMES_LENGTH] += len(line)


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
        active.at_step(step)


def _group_name(group: ProcessGroup | None) -> str:
    """The name of a group, which is the same on all of its ranks."""
    import torch.distributed as dist

    found = group if group is not None else dist.group.WORLD
    return str(getattr(found, "group_name", "world"))


# --------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Message:
    """What a message is: its operation, axis, label and number of elements (-1 if not known)."""

    op: str
    axis: str
    label: str
    size: int = -1

    def __str__(self) -> str:
        label = f', label "{self.label}"' if self.label else ""
        size = f", {self.size:,} elements" if self.size >= 0 else ""
        return f"{self.op} on axis {self.axis}{label}{size}"


@dataclass(frozen=True)
class Lane:
    """Messages of one process that are counted together.

    Attributes:
        group: name of the group.
        kind: "collective", "exchange", "send" or "recv".
        peer: the other rank of a message between two; else -1.
        ranks: the ranks of the group.
        started, ended: numbers of messages.
        recent: the last messages by number.
    """

    group: str
    kind: str
    peer: int
    ranks: tuple[int, ...]
    started: int
    ended: int
    recent: dict[int, Message] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, int]:
        """What identifies the lane among those of its process."""
        return self.group, self.kind, self.peer


@dataclass(frozen=True)
class Wait:
    """The message for which a process waits, and for how many seconds it has."""

    lane: Lane
    number: int
    message: Message
    seconds: float


@dataclass(frozen=True)
class State:
    """What the file of a process says.

    Attributes:
        pid: its process id.
        step: the step, counted from 1; 0 before the first.
        wait: the message for which it waits, or None.
        lanes: all lanes by key.
        beat_s: seconds since its watch last looked.
        stack: its stack when it was last written.
        stack_s: seconds since then.
    """

    pid: int
    step: int
    wait: Wait | None
    lanes: dict[tuple[str, str, int], Lane]
    beat_s: float
    stack: str
    stack_s: float


def read(path: Path) -> State | None:
    """Returns what another process has written, or None if it cannot be read."""
    try:
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), _LENGTH, access=mmap.ACCESS_READ)
    except (OSError, ValueError):
        return None
    with data:
        (magic,) = struct.unpack_from("q", data)
        return _state(data) if magic == _MAGIC else None


def _state(data: mmap.mmap) -> State:
    def words(at: int, n: int) -> tuple[int, ...]:
        return struct.unpack_from(f"{n}q", data, 8 * at)

    now = monotonic_ns()
    head = words(0, _LANES)
    text = data[_NAMES : _NAMES + head[_NAMES_LENGTH]].decode()
    names = [json.loads(line) for line in text.splitlines()]
    sites = {name["site"]: name for name in names if "site" in name}

    def message(site: int, size: int) -> Message:
        name = sites.get(site, {"op": "message", "axis": "?", "label": ""})
        return Message(name["op"], name["axis"], name["label"], size)

    lanes: dict[int, Lane] = {}
    for name in (name for name in names if "lane" in name):
        started, ended, *pairs = words(name["lane"], _WORDS)
        recent = {
            number: message(*pairs[2 * (number % _KEPT) :][:2])
            for number in range(max(1, started - _KEPT + 1), started + 1)
        }
        lanes[name["lane"]] = Lane(
            name["group"], name["kind"], name["peer"], tuple(name["ranks"]), started, ended, recent
        )
    wait = None
    if (lane := lanes.get(head[_LANE])) is not None:
        number = head[_NUMBER]
        what = lane.recent.get(number) or message(head[_SITE], -1)
        wait = Wait(lane, number, what, max(0.0, (now - head[_SINCE]) / 1e9))
    stack = data[_STACK : _STACK + head[_STACK_LENGTH]].decode(errors="replace")
    return State(
        pid=head[_PID],
        step=head[_STEP],
        wait=wait,
        lanes={lane.key: lane for lane in lanes.values()},
        beat_s=(now - head[_BEAT]) / 1e9,
        stack=stack,
        stack_s=(now - head[_STACK_AT]) / 1e9,
    )
