"""The file in which a process notes where it is among its messages: its layout, and its reader.

`gridformer.comm.progress` writes it. It can also be read while its process is stopped.
"""

from __future__ import annotations

import json
import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic_ns

# The file holds int64 words: a header, lanes, and from STACK on two texts.
MAGIC = 0x6772696431
(
    MAGIC_AT,
    LANE,  # where the lane begins in which the process waits; 0 if it does not wait
    NUMBER,  # number of the message in its lane for which it waits
    SITE,  # what that message is
    SINCE,  # since when it waits, in nanoseconds of the monotonic clock
    BEAT,  # time of the last heartbeat of its watch
    STEP,
    PID,
    STACK_AT,  # when its stack was last written
    STACK_LENGTH,  # in bytes
    NAMES_LENGTH,
) = range(11)
assert (LANE, SINCE) == (1, 4)  # code that runs for each message writes these numbers
LANES = 16  # the word where lanes begin
KEPT = 8  # the number of messages of a lane that are described, a power of 2
WORDS = 2 + 2 * KEPT  # numbers started and ended, and (site, size) of each kept one
MOST_LANES = 512
STACK = 8 * (LANES + MOST_LANES * WORDS)  # where the stack begins, in bytes
NAMES = STACK + 32_768
LENGTH = 8 << 20  # a sparse file: only what was written takes memory
_CALL = "  File "  # how the calls of a stack begin

COLLECTIVE, EXCHANGE, SEND, RECEIVE = "collective", "exchange", "send", "recv"
Channel = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True)
class Message:
    """A message: its operation, axis, label and number of elements (-1 if not known)."""

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
        group: Name of the group.
        kind: "collective", "exchange", "send" or "recv".
        peer: The other rank of a message between two; else -1.
        ranks: The ranks of the group.
        started, ended: Numbers of messages.
        recent: The last messages by number.
    """

    group: str
    kind: str
    peer: int
    ranks: tuple[int, ...]
    started: int
    ended: int
    recent: dict[int, Message] = field(default_factory=dict)

    @property
    def others(self) -> tuple[int, ...]:
        """The ranks that count the same messages; this rank may be one of them."""
        return self.ranks if self.peer < 0 else (self.peer,)

    def channel(self, rank: int) -> Channel:
        """Returns what identifies these messages of `rank` on every rank that counts them."""
        if self.peer < 0:
            return self.group, self.kind, self.ranks
        return self.group, SEND, (rank, self.peer) if self.kind == SEND else (self.peer, rank)


@dataclass(frozen=True)
class WaitingMessage:
    """The message for which a process waits, and for how many seconds it has."""

    lane: Lane
    number: int
    message: Message
    seconds: float


@dataclass(frozen=True)
class State:
    """The state of a process, as its file records it.

    Attributes:
        pid: Its process id.
        step: The step, counted from 1; 0 before the first.
        wait: The message for which it waits, or None.
        lanes: All lanes.
        beat_s: Seconds since the last heartbeat of its watch.
        stack: Its calls when they were last written.
        stack_s: Seconds since then.
    """

    pid: int
    step: int
    wait: WaitingMessage | None
    lanes: tuple[Lane, ...]
    beat_s: float
    stack: tuple[str, ...]
    stack_s: float


def read(path: Path) -> State | None:
    """Returns the state that another process has written, or None if it cannot be read."""
    try:
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), LENGTH, access=mmap.ACCESS_READ)
    except (OSError, ValueError):
        return None
    with data:
        (magic,) = struct.unpack_from("q", data)
        return state_of(data) if magic == MAGIC else None


def state_of(data: mmap.mmap) -> State:
    """Returns the state that a file records, given its bytes."""

    def words(at: int, n: int) -> tuple[int, ...]:
        return struct.unpack_from(f"{n}q", data, 8 * at)

    now = monotonic_ns()
    head = words(0, LANES)
    text = data[NAMES : NAMES + head[NAMES_LENGTH]].decode()
    names = [json.loads(line) for line in text.splitlines()]
    sites = {name["site"]: name for name in names if "site" in name}

    def message(site: int, size: int) -> Message:
        name = sites.get(site, {"op": "message", "axis": "?", "label": ""})
        return Message(name["op"], name["axis"], name["label"], size)

    lanes: dict[int, Lane] = {}
    for name in (name for name in names if "lane" in name):
        started, ended, *pairs = words(name["lane"], WORDS)
        recent = {
            number: message(*pairs[2 * (number % KEPT) :][:2])
            for number in range(max(1, started - KEPT + 2), started + 1)  # one may be written now
        }
        lanes[name["lane"]] = Lane(
            name["group"], name["kind"], name["peer"], tuple(name["ranks"]), started, ended, recent
        )
    wait = None
    if (lane := lanes.get(head[LANE])) is not None:
        number = head[NUMBER]
        what = lane.recent.get(number) or message(head[SITE], -1)
        wait = WaitingMessage(lane, number, what, max(0.0, (now - head[SINCE]) / 1e9))
    stack = data[STACK : STACK + head[STACK_LENGTH]].decode(errors="replace")
    return State(
        pid=head[PID],
        step=head[STEP],
        wait=wait,
        lanes=tuple(lanes.values()),
        beat_s=(now - head[BEAT]) / 1e9,
        stack=tuple(f"{_CALL}{call}" for call in stack.split(_CALL)[1:]),
        stack_s=(now - head[STACK_AT]) / 1e9,
    )
