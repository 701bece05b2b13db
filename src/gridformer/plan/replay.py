"""Replays the programs of ranks in time: the host, the compute stream and the messages of each.

- The host launches kernels and messages one after the other. It runs ahead of the device until it
  reads something back.
- The compute stream of a rank runs its kernels in order, and stops at a wait until the message is
  over.
- A message is next on a rank when the messages that the rank started before it in the same group
  are over, and when the compute stream has come to the point where it was started. It begins when
  it is next on all members.

`gridformer.plan.replay_cpu` does this for CPUs, whose processes share cores and links. Members of a
group that have no program do what those do that have one.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from gridformer.record.events import Part, Start

Phase = Literal["forward", "backward", "update"]


class Run(NamedTuple):
    """A kernel.

    Attributes:
        seconds: Time on the device.
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
    """A message is started.

    Attributes:
        number: Identifies the message on its rank.
        start: The message; its own number does not count.
        seconds: Its time once it is next on all its members.
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
    """The compute stream waits for the message with this number."""

    number: int
    phase: Phase


class ReadBack(NamedTuple):
    """The host waits for the compute stream."""


class Block(NamedTuple):
    """A pass that depends on no other rank, replayed beforehand in two ways.

    Attributes:
        ahead: With a host that is far ahead of the device, from the device's beginning.
        behind: With a device that is idle, from when the host comes to it.
    """

    ahead: Spent
    behind: Spent


Item = Run | Send | Await | ReadBack | Block


class Interval(NamedTuple):
    """What a rank does on a stream, `compute` or `messages AXIS`; times are in seconds."""

    stream: str
    kind: str
    name: str
    start: float
    end: float
    module: str = ""


def _seconds_by_name() -> dict[str, float]:
    return defaultdict(float)


@dataclass
class Spent:
    """What the time of one rank was spent on, in seconds.

    Attributes:
        rank: The rank.
        timeline: Whether intervals are kept.
        end: When it comes to its end.
        work: The time of kernels by `Run.part`.
        launches: The time in which the device waits for the host.
        bubble: The time in which it waits for other ranks to start their part of a message.
        late: The same by phase.
        exposed: The time in which it waits for messages that travel, by axis.
        messages: The time that messages travel, by axis.
        phases: All time by phase.
        n_launches: How many kernels and messages are launched.
        intervals: The timeline.
    """

    rank: int
    timeline: bool = False
    end: float = 0.0
    work: dict[str, float] = field(default_factory=_seconds_by_name)
    launches: float = 0.0
    bubble: float = 0.0
    late: dict[str, float] = field(default_factory=_seconds_by_name)
    exposed: dict[str, float] = field(default_factory=_seconds_by_name)
    messages: dict[str, float] = field(default_factory=_seconds_by_name)
    phases: dict[str, float] = field(default_factory=_seconds_by_name)
    n_launches: int = 0
    intervals: list[Interval] = field(default_factory=list)

    def computed(self, run: Run, start: float, end: float) -> None:
        """Notes the interval of a kernel."""
        self.intervals.append(Interval("compute", run.part, run.name, start, end, run.module))

    def waited(self, axis: str, phase: Phase, start: float, end: float, late: float) -> None:
        """Adds a wait for a message, whose first `late` seconds were for other ranks."""
        self.bubble += late
        self.late[phase] += late
        self.exposed[axis] += end - start - late
        self.phases[phase] += end - start
        if self.timeline and end > start:
            kind = "bubble" if late > (end - start) / 2 else "exposed"
            self.intervals.append(Interval("compute", kind, f"waits for {axis}", start, end))

    def traveled(self, start: Start, began: float, ended: float) -> None:
        """Adds a message."""
        self.messages[start.axis] += ended - began
        if self.timeline:
            stream, name = f"messages {start.axis}", f"{start.op} {start.label}".strip()
            module = start.place.module
            self.intervals.append(Interval(stream, "message", name, began, ended, module))


class StuckError(Exception):
    """The programs of these ranks wait for each other, which `gridformer check` explains."""

    def __str__(self) -> str:
        return f"ranks {self.args[0]} wait for messages that never end"


def replay(
    programs: Mapping[int, Sequence[Item]],
    launch_s: float,
    timeline: bool = False,
    begins: tuple[float, float] = (0.0, 0.0),
) -> list[Spent]:
    """Replays the programs of ranks on GPUs.

    Args:
        programs: The program of each rank that has one.
        launch_s: Seconds that the host needs for a launch.
        timeline: Whether intervals are kept.
        begins: When the host and the compute stream of all ranks begin.

    Raises:
        StuckError: They wait for each other.
    """
    return _Replay(programs, launch_s, timeline, begins).go()


@dataclass(slots=True, eq=False)
class _Call:
    """A message of one rank."""

    send: Send
    ready: float  # when the compute stream had come to it
    left: list[Part] = field(default_factory=list)  # for p2p, the parts that are not carried out
    free: float = 0.0  # when its stream was free for it
    began: float = math.inf
    ended: float = 0.0
    over: bool = False


@dataclass
class _Rank:
    """Where a rank is, and the times of its host and its compute stream."""

    items: Sequence[Item]
    spent: Spent
    host: float
    device: float
    at: int = 0
    calls: dict[int, _Call] = field(default_factory=dict)
    awaits: _Call | None = None


class _Replay:
    def __init__(
        self,
        programs: Mapping[int, Sequence[Item]],
        launch_s: float,
        timeline: bool,
        begins: tuple[float, float],
    ) -> None:
        self.ranks = {
            rank: _Rank(items, Spent(rank, timeline), *begins) for rank, items in programs.items()
        }
        self.launch_s = launch_s
        self.queues: dict[str, dict[int, deque[_Call]]] = {}
        self.free: dict[tuple[str, int], float] = {}  # when a group's stream on a rank is free
        self.awake = deque(self.ranks)

    def go(self) -> list[Spent]:
        while self.awake:
            self._run(self.awake.popleft())
        if stuck := [rank for rank, one in self.ranks.items() if one.at < len(one.items)]:
            raise StuckError(stuck)
        for one in self.ranks.values():
            one.spent.end = one.device
        return [one.spent for one in self.ranks.values()]

    def _run(self, rank: int) -> None:
        """Lets a rank go on until it waits for a message that is not over."""
        one = self.ranks[rank]
        items, spent, launch_s = one.items, one.spent, self.launch_s
        work, phases = spent.work, spent.phases
        while one.at < len(items):
            item = items[one.at]
            if type(item) is Run:
                seconds, launches, part, _, _, phase = item
                one.host += launch_s * launches
                spent.n_launches += launches
                if one.host > one.device:
                    self._idle(one, phase)
                if spent.timeline:
                    spent.computed(item, one.device, one.device + seconds)
                one.device += seconds
                work[part] += seconds
                phases[phase] += seconds
            elif type(item) is Send:
                one.host += launch_s
                spent.n_launches += 1
                self._start(rank, one, item)
            elif type(item) is Await:
                call = one.calls[item.number]
                if not call.over:
                    one.awaits = call
                    return
                if one.host > one.device:
                    self._idle(one, item.phase)
                if call.ended > one.device:
                    late = max(0.0, call.began - max(one.device, call.free))
                    spent.waited(call.send.start.axis, item.phase, one.device, call.ended, late)
                    one.device = call.ended
            elif type(item) is Block:
                self._block(one, item)
            else:
                one.host = max(one.host, one.device)
            one.at += 1

    def _idle(self, one: _Rank, phase: Phase) -> None:
        """The device waits for the host."""
        one.spent.launches += one.host - one.device
        one.spent.phases[phase] += one.host - one.device
        one.device = one.host

    def _block(self, one: _Rank, block: Block) -> None:
        """Runs a pass whose times are known; it is over when both have come to its end."""
        end = max(one.device + block.ahead.end, one.host + block.behind.end)
        used = block.ahead if end == one.device + block.ahead.end else block.behind
        spent, elapsed = one.spent, end - one.device
        for mine, more in (
            (spent.work, used.work),
            (spent.exposed, used.exposed),
            (spent.messages, used.messages),
        ):
            for name, seconds in more.items():
                mine[name] += seconds
        spent.bubble += used.bubble
        busy = sum(used.work.values()) + used.bubble + sum(used.exposed.values())
        spent.launches += max(0.0, elapsed - busy)  # rounding may go below
        whole = sum(block.ahead.phases.values()) or 1.0
        for phase, seconds in block.ahead.phases.items():
            spent.phases[phase] += elapsed * (seconds / whole)
        spent.n_launches += block.ahead.n_launches
        one.device = end
        one.host += self.launch_s * block.ahead.n_launches

    # ------------------------------------------------------------------ messages

    def _start(self, rank: int, one: _Rank, send: Send) -> None:
        start = send.start
        queues = self.queues.get(start.group)
        if queues is None:
            members = [member for member in start.ranks if member in self.ranks]
            queues = self.queues[start.group] = {member: deque() for member in members}
        call = one.calls[send.number] = _Call(send, max(one.host, one.device))
        if start.op == "p2p":
            call.left = [part for part in start.parts if part.peer in self.ranks]
        queue = queues[rank]
        queue.append(call)
        if len(queue) == 1:  # otherwise it is not next
            self._carry_out(start.group, queues, rank)

    def _carry_out(self, group: str, queues: dict[int, deque[_Call]], rank: int) -> None:
        """Carries out the next message of a rank, as far as others have come to it, and so on."""
        fresh = [rank]
        while fresh:
            rank = fresh.pop()
            if not (queue := queues[rank]):
                continue
            if queue[0].send.start.op == "p2p":
                fresh += self._match_parts(group, queues, rank, queue[0])
            elif all(some and some[0].send.start.op != "p2p" for some in queues.values()):
                calls = {member: some[0] for member, some in queues.items()}
                began = max(self._ready(group, member, call) for member, call in calls.items())
                ended = began + max(call.send.seconds for call in calls.values())
                for member, call in calls.items():
                    call.began, call.ended = began, ended
                    self._end(group, queues[member], member, call)
                fresh += calls

    def _match_parts(
        self, group: str, queues: dict[int, deque[_Call]], rank: int, call: _Call
    ) -> list[int]:
        """Carries out parts of a message; returns the ranks on which another is next then."""
        fresh = []
        for part in list(call.left):
            theirs = queues[part.peer]
            for there in theirs[0].left if theirs else ():
                if there.peer == rank and there.what != part.what:
                    break
            else:
                continue
            other = theirs[0]
            began = max(self._ready(group, rank, call), self._ready(group, part.peer, other))
            ended = began + max(call.send.seconds, other.send.seconds)
            for one in (call, other):
                one.began, one.ended = min(one.began, began), max(one.ended, ended)
            call.left.remove(part)
            other.left.remove(there)
            if not other.left:
                self._end(group, theirs, part.peer, other)
                fresh.append(part.peer)
        if not call.left:
            if not call.ended:  # all its peers are ranks without a program
                call.began = self._ready(group, rank, call)
                call.ended = call.began + call.send.seconds
            self._end(group, queues[rank], rank, call)
            fresh.append(rank)
        return fresh

    def _ready(self, group: str, rank: int, call: _Call) -> float:
        return max(call.ready, self.free.get((group, rank), 0.0))

    def _end(self, group: str, queue: deque[_Call], rank: int, call: _Call) -> None:
        """Ends the message that is next on a rank."""
        queue.popleft()
        free = self.free.get((group, rank), 0.0)
        call.free, call.over = max(call.ready, free), True
        self.free[group, rank] = max(free, call.ended)
        one = self.ranks[rank]
        if one.awaits is call:
            self.awake.append(rank)
        one.spent.traveled(call.send.start, call.began, call.ended)
