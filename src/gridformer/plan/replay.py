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

from gridformer.plan.program import (
    Await,
    Block,
    Interval,
    Phase,
    Program,
    ReadBack,
    Run,
    Send,
    Spent,
)
from gridformer.record.events import Part


class _Call:
    """A message of one rank.

    Attributes:
        send: The message.
        ready: When the compute stream had come to it.
        left: For p2p, the parts that are not carried out.
        free: When its stream was free for it.
        began: When it began.
        ended: When it ended.
        over: Whether it has ended.
    """

    __slots__ = ("began", "ended", "free", "left", "over", "ready", "send")

    def __init__(self, send: Send, ready: float) -> None:
        self.send, self.ready, self.over = send, ready, False
        self.left: list[Part] = []
        self.free, self.began, self.ended = 0.0, float("inf"), 0.0


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
        self.calls: dict[int, _Call] = {}
        self.awaits: _Call | None = None
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
                call = one.calls[item.number]
                if not call.over:
                    one.awaits = call
                    return
                self._wait(one, call, item.phase)
            elif type(item) is Block:
                self._block(one, item)
            else:
                assert isinstance(item, ReadBack)
                one.host = max(one.host, one.device)
            one.at += 1

    def _idle(self, one: _Rank, phase: Phase) -> None:
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

    def _wait(self, one: _Rank, call: _Call, phase: Phase) -> None:
        axis, spent = call.send.start.axis, one.spent
        if one.host > one.device:
            self._idle(one, phase)
        if call.ended > one.device:
            late = max(0.0, call.began - max(one.device, call.free))
            stopped = call.ended - one.device
            spent.bubble += late
            spent.late[phase] += late
            spent.exposed[axis] += stopped - late
            spent.phases[phase] += stopped
            if self.timeline:
                kind = "bubble" if late > stopped / 2 else "exposed"
                name = f"waits for {axis}"
                spent.intervals.append(Interval("compute", kind, name, one.device, call.ended, ""))
            one.device = call.ended

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
        """Carries out what is next on a rank, as far as others have come to it, and what follows.

        Args:
            group: The name of a group.
            queues: The messages of its members that are not over.
            rank: One of them.
        """
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
        found = []
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
                found.append(part.peer)
        if not call.left:
            if not call.ended:  # all its peers are ranks without a program
                call.began = self._ready(group, rank, call)
                call.ended = call.began + call.send.seconds
            self._end(group, queues[rank], rank, call)
            found.append(rank)
        return found

    def _ready(self, group: str, rank: int, call: _Call) -> float:
        return max(call.ready, self.free.get((group, rank), 0.0))

    def _end(self, group: str, queue: deque[_Call], rank: int, call: _Call) -> None:
        """Ends the message that is next on a rank."""
        queue.popleft()
        free = self.free.get((group, rank), 0.0)
        call.free, call.over = max(call.ready, free), True
        self.free[group, rank] = max(free, call.ended)
        one, start = self.ranks[rank], call.send.start
        spent = one.spent
        if one.awaits is call:
            self.awake.append(rank)
        spent.messages[start.axis] += call.ended - call.began
        if self.timeline:
            stream, name = f"messages {start.axis}", f"{start.op} {start.label}".strip()
            began, ended, module = call.began, call.ended, start.place.module
            spent.intervals.append(Interval(stream, "message", name, began, ended, module))
