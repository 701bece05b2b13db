"""Replays the programs of ranks in time: the host, the compute stream and the messages of each.

- The host launches kernels and messages one after the other. It runs ahead of the device until it
  reads something back.
- The compute stream of a rank runs its kernels in order.
- A message is next on a rank when the messages that the rank started before it in the same group
  are over, and when the compute stream has come to the point where it was started. It begins when
  it is next on all members.
- At a wait the compute stream stops until the message is over.

`gridformer.plan.replay_cpu` does this for CPUs, whose processes share cores and links, and
`gridformer.check.simulate` without time. Members of a group that have no program
do what those do that have one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gridformer.plan.program import Await, Block, Interval, Program, ReadBack, Run, Send, Spent
from gridformer.trace.events import Part


class _Over(NamedTuple):
    """A message that is over: when its stream was free for it, when it began and when it ended."""

    free: float
    began: float
    ended: float


@dataclass(eq=False)
class _Call:
    """A message of one rank that is not over."""

    send: Send
    ready: float
    left: list[Part]
    began: float = float("inf")
    ended: float = 0.0


class StuckError(Exception):
    """The programs wait for each other, which `gridformer check` explains."""


def replay(
    programs: Sequence[Program],
    launch_s: float,
    timeline: bool = False,
    begins: tuple[float, float] = (0.0, 0.0),
) -> list[Spent]:
    """Replays the programs of ranks.

    Args:
        programs: The programs. Ranks without one do what those in their groups do that have one.
        launch_s: Seconds that the host needs for a launch.
        timeline: Whether intervals are kept.
        begins: When the host and the compute stream of all ranks begin.

    Raises:
        StuckError: They wait for each other.
    """
    state = _Replay(programs, launch_s, timeline)
    for one in state.ranks.values():
        one.host, one.device = begins
    return state.go()


class _Rank:
    """The state of one rank: where it is, and the times of its host and its compute stream."""

    def __init__(self, program: Program) -> None:
        self.items, self.at = program.items, 0
        self.host = self.device = 0.0
        self.over: dict[int, _Over] = {}
        self.axes: dict[int, str] = {}
        self.spent = Spent(program.rank)


class _Replay:
    def __init__(self, programs: Sequence[Program], launch_s: float, timeline: bool) -> None:
        self.ranks = {program.rank: _Rank(program) for program in programs}
        self.launch_s, self.timeline = launch_s, timeline
        self.queues: dict[str, dict[int, deque[_Call]]] = {}
        self.free: dict[tuple[str, int], float] = {}  # when a group's stream on a rank is free
        self.awake = deque(self.ranks)

    def go(self) -> list[Spent]:
        while self.awake:
            self._run(self.awake.popleft())
        stuck = [rank for rank, one in self.ranks.items() if one.at < len(one.items)]
        if stuck:
            raise StuckError(f"ranks {stuck} wait for messages that never end")
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
                seconds, launches, part, name, module, phase = item
                one.host += launch_s * launches
                spent.n_launches += launches
                if one.host > one.device:
                    spent.launches += one.host - one.device
                    phases[phase] += one.host - one.device
                    one.device = one.host
                if self.timeline:
                    end = one.device + seconds
                    spent.intervals.append(Interval("compute", part, name, one.device, end, module))
                one.device += seconds
                work[part] += seconds
                phases[phase] += seconds
            elif type(item) is Send:
                one.host += launch_s
                spent.n_launches += 1
                self._start(rank, one, item)
            elif type(item) is Await:
                if item.number not in one.over:
                    return
                self._wait(one, item)
            elif type(item) is Block:
                self._block(one, item)
            else:
                assert isinstance(item, ReadBack)
                one.host = max(one.host, one.device)
            one.at += 1

    def _idle(self, one: _Rank, phase: str) -> None:
        """The device waits for the host."""
        one.spent.launches += one.host - one.device
        one.spent.phases[phase] += one.host - one.device
        one.device = one.host

    def _block(self, one: _Rank, block: Block) -> None:
        """Runs a pass whose times are known; it is over when both have come to its end."""
        ahead, behind = one.device + block.ahead, one.host + block.behind
        end = max(ahead, behind)
        used = block.spent_ahead if end == ahead else block.spent_behind
        spent, elapsed = one.spent, end - one.device
        for mine, more in (
            (spent.work, used.work),
            (spent.exposed, used.exposed),
            (spent.messages, used.messages),
        ):
            for name, seconds in more.items():
                mine[name] += seconds
        spent.bubble += used.bubble
        spent.launches += max(0.0, elapsed - used.busy)  # rounding may go below
        for phase, share in block.phases.items():
            spent.phases[phase] += elapsed * share
        spent.n_launches += block.launches
        if self.timeline:
            spent.intervals.append(Interval("compute", "pass", block.name, one.device, end, ""))
        one.device = end
        one.host += block.host

    def _wait(self, one: _Rank, item: Await) -> None:
        over, axis, spent = one.over[item.number], one.axes[item.number], one.spent
        if one.host > one.device:
            self._idle(one, item.phase)
        if over.ended > one.device:
            late = max(0.0, over.began - max(one.device, over.free))
            stopped = over.ended - one.device
            spent.bubble += late
            spent.late[item.phase] += late
            spent.exposed[axis] += stopped - late
            spent.phases[item.phase] += stopped
            if self.timeline:
                kind = "bubble" if late > stopped / 2 else "exposed"
                name = f"waits for {axis}"
                spent.intervals.append(Interval("compute", kind, name, one.device, over.ended, ""))
            one.device = over.ended

    # ------------------------------------------------------------------ messages

    def _start(self, rank: int, one: _Rank, send: Send) -> None:
        start = send.start
        one.axes[start.number] = start.axis
        queues = self.queues.get(start.group)
        if queues is None:
            members = [member for member in start.ranks if member in self.ranks]
            queues = self.queues[start.group] = {member: deque() for member in members}
        queue = queues[rank]
        parts = [part for part in start.parts if part.peer in self.ranks]
        call = _Call(send, max(one.host, one.device), parts)
        queue.append(call)
        if len(queue) > 1:
            return
        if len(queues) == 1 and start.op != "p2p":  # nobody else in the group has a program
            call.began = self._ready(start.group, rank, call)
            call.ended = call.began + send.seconds
            self._end(start.group, queue, rank, call)
        else:
            self._carry_out(start.group, queues, rank)

    def _carry_out(self, group: str, queues: dict[int, deque[_Call]], rank: int) -> None:
        """Carries out whatever a new message of a rank makes possible."""
        fresh = deque([rank])
        while fresh:
            rank = fresh.popleft()
            for call in self._next(queues[rank]):
                if call.send.start.op == "p2p":
                    fresh.extend(self._match_parts(group, queues, rank, call))
                elif all(self._collectives(queue) for queue in queues.values()):
                    fresh.extend(self._match_all(group, queues))
                    break

    def _next(self, queue: deque[_Call]) -> list[_Call]:
        """Returns the messages of a rank that may be carried out now."""
        return [queue[0]] if queue else []

    def _collectives(self, queue: deque[_Call]) -> list[_Call]:
        """Returns the collective of a rank that is next, in a list that may be empty."""
        return [queue[0]] if queue and queue[0].send.start.op != "p2p" else []

    def _match_all(self, group: str, queues: dict[int, deque[_Call]]) -> list[int]:
        calls = {rank: self._collectives(queue)[0] for rank, queue in queues.items()}
        began = max(
            max(call.ready, self.free.get((group, rank), 0.0)) for rank, call in calls.items()
        )
        ended = began + max(call.send.seconds for call in calls.values())
        for rank, call in calls.items():
            call.began, call.ended = began, ended
            self._finish(group, queues, rank, call)
        return list(calls)

    def _match_parts(
        self, group: str, queues: dict[int, deque[_Call]], rank: int, call: _Call
    ) -> list[int]:
        found = []
        for part in list(call.left):
            wanted = ("recv" if part.what == "send" else "send", rank)
            match = next(
                (
                    (other, p)
                    for other in self._next(queues.get(part.peer, deque()))
                    for p in other.left
                    if (p.what, p.peer) == wanted
                ),
                None,
            )
            if match is None:
                continue
            other, there = match
            began = max(self._ready(group, rank, call), self._ready(group, part.peer, other))
            for one in (call, other):
                one.began = min(one.began, began)
                one.ended = max(one.ended, began + max(call.send.seconds, other.send.seconds))
            call.left.remove(part)
            other.left.remove(there)
            if not other.left:
                self._finish(group, queues, part.peer, other)
                found.append(part.peer)
        if not call.left:
            if not call.ended:  # all its peers are ranks without a program
                call.began = self._ready(group, rank, call)
                call.ended = call.began + call.send.seconds
            self._finish(group, queues, rank, call)
            found.append(rank)
        return found

    def _ready(self, group: str, rank: int, call: _Call) -> float:
        return max(call.ready, self.free.get((group, rank), 0.0))

    def _finish(self, group: str, queues: dict[int, deque[_Call]], rank: int, call: _Call) -> None:
        self._end(group, queues[rank], rank, call)
        self.awake.append(rank)

    def _end(self, group: str, queue: deque[_Call], rank: int, call: _Call) -> None:
        one, start = self.ranks[rank], call.send.start
        queue.remove(call)
        free = self._ready(group, rank, call)
        self.free[group, rank] = max(self.free.get((group, rank), 0.0), call.ended)
        one.over[start.number] = _Over(free, call.began, call.ended)
        one.spent.messages[start.axis] += call.ended - call.began
        if self.timeline:
            name = f"{start.op} {start.label}".strip()
            one.spent.intervals.append(
                Interval(
                    f"messages {start.axis}",
                    "message",
                    name,
                    call.began,
                    call.ended,
                    start.place.module,
                )
            )
