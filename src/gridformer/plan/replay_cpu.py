"""Replays the programs of ranks on a CPU: processes that share its cores, and messages over gloo.

Time goes from one event to the next, and between two events everything goes on at its own rate:

- Each process computes in one thread, and each message that travels keeps a thread of gloo busy
  until it is copied and added up. Threads that are not waiting share the cores evenly. The times of
  kernels were measured with all processes computing, and those of messages with all sending, so
  this is the rate 1. It is lower while a process computes and sends, and higher while others wait,
  up to that of a process with a core of its own, as in the bubbles of a pipeline.
- A message between nodes takes the link of its node, which messages that travel at the same time
  share evenly: those of other axes, too.
- A message begins when all its members have come to it. Two collectives of a group travel at the
  same time at most, because gloo has two threads for them.

`gridformer.plan.replay` does the same for GPUs, where messages and kernels do not share anything.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gridformer.plan.replay import Await, Item, Run, Send, Spent, StuckError

_THREADS = 2  # of gloo for the collectives of a group
_DONE = 1e-12  # seconds: what is left because of rounding


def replay_cpu(
    programs: Mapping[int, Sequence[Item]],
    launch_s: float,
    n_processes: int,
    n_cores: float,
    weights: Mapping[int, float],
    timeline: bool = False,
) -> list[Spent]:
    """Replays the programs of ranks on CPUs.

    Args:
        programs: The program, without blocks, of each rank that has one.
        launch_s: Seconds of Python for a kernel or a message.
        n_processes: All processes of the run, with which times were measured.
        n_cores: Cores that they share; infinity for a core for each thread.
        weights: How many processes each rank with a program stands for.

    Raises:
        StuckError: They wait for each other.
    """
    return _Replay(programs, launch_s, n_processes, n_cores, weights, timeline).go()


@dataclass(eq=False)
class _Flight:
    """A message that travels, or is yet to."""

    calls: list[tuple[int, Send]]  # its ranks with a program, and the message on each
    cpu: float  # seconds of a thread that are left on each rank
    link: float  # seconds on the links that are left
    lanes: tuple[tuple[int, str], ...]  # the directions of the ranks' links that it takes
    began: float  # when all its ranks had come to it
    group: str = ""  # in whose queue it waits for one of gloo's threads


@dataclass(eq=False)
class _Call:
    """A message of one rank that has been started: how much of it is left, and when it began."""

    axis: str
    left: int
    began: float = math.inf


@dataclass
class _Rank:
    """Where a rank is: it is `doing` something while `left` is positive, or waits for a message."""

    items: Sequence[Item]
    weight: float
    spent: Spent
    at: int = 0
    left: float = 0.0
    doing: Run | Send | None = None
    since: float = 0.0
    waits: bool = False
    calls: dict[int, _Call] = field(default_factory=dict)


class _Replay:
    def __init__(
        self,
        programs: Mapping[int, Sequence[Item]],
        launch_s: float,
        n_processes: int,
        n_cores: float,
        weights: Mapping[int, float],
        timeline: bool,
    ) -> None:
        self.ranks = {
            rank: _Rank(items, weights[rank], Spent(rank, timeline))
            for rank, items in programs.items()
        }
        self.launch_s, self.n_cores = launch_s, n_cores
        self.measured = min(1.0, n_cores / n_processes)  # the part of a core at rate 1
        self.now = 0.0
        self.flights: list[_Flight] = []
        # Collectives by group and their number in it, and point-to-point messages by direction:
        # what those ranks have started that have come to them.
        self.arrived: dict[tuple[str, int], list[tuple[int, Send]]] = defaultdict(list)
        self.count: dict[tuple[str, int], int] = defaultdict(int)
        self.queues: dict[str, deque[_Flight]] = defaultdict(deque)
        self.flying: dict[str, int] = defaultdict(int)
        self.pairs: dict[tuple[str, int, int], tuple[deque[Send], deque[Send]]] = {}

    def go(self) -> list[Spent]:
        while True:
            while any(self._come_to_wait(rank) for rank in self.ranks):
                pass
            if not self._advance():
                break
        if stuck := [rank for rank, one in self.ranks.items() if one.at < len(one.items)]:
            raise StuckError(stuck)
        return [one.spent for one in self.ranks.values()]

    # ------------------------------------------------------------------ time

    def _advance(self) -> bool:
        """Goes to the next event; returns False if there is none."""
        busy = [one for one in self.ranks.values() if one.left > 0]
        copied = [f for f in self.flights if f.cpu > 0]
        moved = [f for f in self.flights if f.link > 0]
        if not busy and not self.flights:
            return False
        threads = sum(one.weight for one in busy)
        threads += sum(self.ranks[rank].weight for f in copied for rank, _ in f.calls)
        rate = min(1 / self.measured, self.n_cores / threads / self.measured) if threads else 1.0
        sharing: dict[tuple[int, str], int] = defaultdict(int)
        for flight in moved:
            for lane in flight.lanes:
                sharing[lane] += 1
        rates = [1 / max(sharing[lane] for lane in f.lanes) for f in moved]
        times = [one.left / rate for one in busy] + [f.cpu / rate for f in copied]
        times += [f.link / r for f, r in zip(moved, rates)]
        times += [0.0 for f in self.flights if not f.cpu and not f.link]
        step = min(times)
        self.now += step
        for flight in copied:
            flight.cpu = _less(flight.cpu, step * rate)
        for flight, r in zip(moved, rates):
            flight.link = _less(flight.link, step * r)
        for one in busy:
            one.left = _less(one.left, step * rate)
        for flight in [f for f in self.flights if not f.cpu and not f.link]:
            self._arrive(flight)
        for one in busy:
            if not one.left:
                self._computed(one.spent.rank, one)
        return True

    def _computed(self, rank: int, one: _Rank) -> None:
        """Ends a kernel, or starts a message for which Python has done its part."""
        item, elapsed, spent = one.doing, self.now - one.since, one.spent
        assert item is not None
        kernel_s, launches = _kernel(item)
        whole = kernel_s + launches * self.launch_s
        worked = elapsed * kernel_s / whole if whole else 0.0
        spent.n_launches += launches
        spent.launches += elapsed - worked
        spent.phases[item.phase] += elapsed
        spent.end = self.now
        if isinstance(item, Run):
            spent.work[item.part] += worked
            if spent.timeline:
                spent.computed(item, self.now - worked, self.now)
        else:
            self._start(rank, one, item)
        one.doing = None
        one.at += 1

    def _arrive(self, flight: _Flight) -> None:
        self.flights.remove(flight)
        for rank, send in flight.calls:
            call = self.ranks[rank].calls[send.number]
            call.began, call.left = min(call.began, flight.began), call.left - 1
            if not call.left:
                self.ranks[rank].spent.traveled(send.start, call.began, self.now)
        if flight.group:
            self.flying[flight.group] -= 1
            self._take_off(flight.group)

    # ------------------------------------------------------------------ programs

    def _come_to_wait(self, rank: int) -> bool:
        """Lets a rank go on until it computes or waits; returns whether it has done anything."""
        one, moved = self.ranks[rank], False
        while not one.left and one.at < len(one.items):
            item = one.items[one.at]
            if isinstance(item, Await):
                if not one.waits:
                    one.waits, one.since = True, self.now
                call = one.calls[item.number]
                if call.left:
                    return moved
                late = min(self.now - one.since, max(0.0, call.began - one.since))
                one.spent.waited(call.axis, item.phase, one.since, self.now, late)
                one.spent.end, one.waits = self.now, False
                one.at += 1
            elif isinstance(item, Run | Send):
                one.doing, one.since = item, self.now
                kernel_s, launches = _kernel(item)
                one.left = launches * self.launch_s + kernel_s
                if one.left > 0:
                    return True
                self._computed(rank, one)
            else:
                one.at += 1  # on a CPU nothing has to be read back
            moved = True
        return moved

    # ------------------------------------------------------------------ messages

    def _start(self, rank: int, one: _Rank, send: Send) -> None:
        start = send.start
        one.calls[send.number] = call = _Call(start.axis, 1)
        if start.op == "p2p":
            self._start_parts(rank, call, send)
            return
        key = start.group, self.count[start.group, rank]
        self.count[start.group, rank] += 1
        here = self.arrived[key]
        here.append((rank, send))
        if len(here) < sum(member in self.ranks for member in start.ranks):
            return
        cpu, link = (max(values) for values in zip(*(_work(s) for _, s in here)))
        lanes = tuple((member, way) for member, _ in here for way in ("out", "in"))
        self.queues[start.group].append(_Flight(here, cpu, link, lanes, self.now, start.group))
        self._take_off(start.group)

    def _take_off(self, group: str) -> None:
        while self.queues[group] and self.flying[group] < _THREADS:
            self.flying[group] += 1
            self.flights.append(self.queues[group].popleft())

    def _start_parts(self, rank: int, call: _Call, send: Send) -> None:
        parts = [part for part in send.start.parts if part.peer in self.ranks]
        call.left = len(parts) or 1
        if not parts:  # all its peers are ranks without a program
            cpu, link = _work(send)
            lanes = ((rank, "out"), (rank, "in"))
            self.flights.append(_Flight([(rank, send)], cpu, link, lanes, self.now))
        for part in parts:
            ends = (rank, part.peer) if part.what == "send" else (part.peer, rank)
            mine, others = self.pairs.setdefault((send.start.group, *ends), (deque(), deque()))
            if part.what == "recv":
                mine, others = others, mine
            if not others:
                mine.append(send)
                continue
            other = others.popleft()
            # The part of the messages posted together in this direction.
            posted = sum(one.size for one in send.start.parts if one.what == part.what)
            share = part.size / max(1, posted)
            cpu, link = (share * max(two) for two in zip(_work(send), _work(other)))
            calls = [(rank, send), (part.peer, other)]
            lanes = ((ends[0], "out"), (ends[1], "in"))
            self.flights.append(_Flight(calls, cpu, link, lanes, self.now))


def _kernel(item: Run | Send) -> tuple[float, int]:
    """Returns the seconds of a kernel, and the number of launches."""
    return (item.seconds, item.launches) if isinstance(item, Run) else (0.0, 1)


def _less(left: float, done: float) -> float:
    return left - done if left - done > _DONE + 1e-9 * done else 0.0


def _work(send: Send) -> tuple[float, float]:
    """Returns the seconds of a thread and on the links that a message takes."""
    if send.cpu is None:
        return send.seconds, 0.0
    return send.cpu, send.seconds
