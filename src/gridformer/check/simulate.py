"""Replays the messages of all ranks by NCCL's rules, and says where they stop.

- A group carries out the messages of a rank one after the other, in the order in which the rank
  started them.
- A collective is carried out when it is next on all members of its group.
- A message between two ranks is carried out when it is next on both. Those that a rank posts
  together are next together.
- A rank that waits for a message starts nothing until that message has been carried out.

The result does not depend on the speed of the ranks: a message that can be carried out stays so
until it is.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gridformer.record.events import Part, Place, SingleEvent, Start, Wait

Calls = dict[int, Start]  # by rank


@dataclass
class Mismatch:
    """A message whose ends do not fit together.

    Attributes:
        different: The ranks that differ from the majority; for two ranks, the second.
        order: Whether the ranks call different collectives, so that the group cannot go on.
    """

    calls: Calls
    different: tuple[int, ...]
    order: bool = False


@dataclass
class Stop:
    """A rank that does not finish, or a message of a rank that is never carried out.

    Attributes:
        waiting: Where it waits; None if it has finished.
        call: The message that it waits for.
        blocking: The message that is next in the same group on this rank, which may be another one.
        missing: The ranks that have not come to `blocking`.
        answers: For each of these that has already started its part, this part and the message
            before it that is next on that rank.
    """

    rank: int
    waiting: Place | None
    call: Start
    blocking: Start
    missing: tuple[int, ...]
    answers: dict[int, tuple[Start, Start]] = field(default_factory=dict)


@dataclass
class Outcome:
    """The result of a replay.

    Attributes:
        stops: One for each rank that does not finish, and for each message left over.
        ended: The ranks that have finished.
        counts: For each group, how many collectives each of its ranks starts in a step.
    """

    mismatches: list[Mismatch] = field(default_factory=list)
    stops: list[Stop] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    counts: dict[str, Counter[int]] = field(default_factory=dict)


@dataclass
class _Queue:
    """The messages of one rank in one group that have not been carried out."""

    calls: deque[Start] = field(default_factory=deque)
    left: list[Part] = field(default_factory=list)  # of the first, those that have no match yet


@dataclass
class _Group:
    queues: dict[int, _Queue]
    n_ready: int = 0  # members with a message
    broken: bool = False


def simulate(programs: Mapping[int, Sequence[SingleEvent]]) -> Outcome:
    """Replays the events of each rank, in order, as if there were no other ranks than these.

    Groups lose the ranks that were not traced, which do what those do that represent them. Messages
    to and from such ranks are left out.
    """
    return _Replay(programs).go()


class _Replay:
    def __init__(self, programs: Mapping[int, Sequence[SingleEvent]]) -> None:
        self.programs = programs
        self.at = dict.fromkeys(programs, 0)
        self.done: dict[int, set[int]] = {rank: set() for rank in programs}
        self.groups: dict[str, _Group] = {}
        self.awake = deque(programs)
        self.outcome = Outcome(counts=_counts(programs))

    def go(self) -> Outcome:
        while self.awake:
            self._run(self.awake.popleft())
        for rank, events in self.programs.items():
            if self.at[rank] >= len(events):
                self.outcome.ended.add(rank)
        self._find_stops()
        return self.outcome

    def _run(self, rank: int) -> None:
        """Lets a rank go on until it waits."""
        events, done = self.programs[rank], self.done[rank]
        while self.at[rank] < len(events):
            event = events[self.at[rank]]
            if isinstance(event, Wait):
                if event.number not in done:
                    return
            elif isinstance(event, Start):
                self._start(rank, event)
            self.at[rank] += 1

    def _start(self, rank: int, call: Start) -> None:
        group = self.groups.get(call.group)
        if group is None:
            queues = {member: _Queue() for member in call.ranks if member in self.programs}
            group = self.groups[call.group] = _Group(queues)
        queue = group.queues[rank]
        queue.calls.append(call)
        if len(queue.calls) == 1:
            queue.left = self._parts(call)
            group.n_ready += 1
            self._carry_out(group, rank)

    def _parts(self, call: Start) -> list[Part]:
        return [part for part in call.parts if part.peer in self.programs]

    def _carry_out(self, group: _Group, rank: int) -> None:
        """Carries out whatever a new first message of a rank makes possible."""
        fresh = deque([rank])
        while fresh and not group.broken:
            rank = fresh.popleft()
            queue = group.queues[rank]
            if not queue.calls:
                continue
            if queue.calls[0].op == "p2p":
                fresh.extend(self._match_parts(group, rank))
            elif group.n_ready == len(group.queues):
                fresh.extend(self._match_all(group))

    def _match_all(self, group: _Group) -> list[int]:
        """Carries out a collective that is next on all members. Returns whose next is new."""
        calls = {rank: queue.calls[0] for rank, queue in group.queues.items()}
        ops = Counter(call.op for call in calls.values())
        if "p2p" in ops:
            return []  # it may still be carried out, and a collective come after it
        different = _different(calls)
        if len(ops) > 1:
            group.broken = True
            self.outcome.mismatches.append(Mismatch(calls, different, order=True))
            return []
        if different:
            self.outcome.mismatches.append(Mismatch(calls, different))
        for rank in calls:
            self._finish(group, rank)
        return list(calls)

    def _match_parts(self, group: _Group, rank: int) -> list[int]:
        """Carries out messages between this rank and others. Returns whose next is new."""
        queue = group.queues[rank]
        call, fresh = queue.calls[0], []
        for part in list(queue.left):
            there = group.queues.get(part.peer)
            if there is None or not there.calls:
                continue
            other = {"send": "recv", "recv": "send"}[part.what]
            match = next((p for p in there.left if (p.what, p.peer) == (other, rank)), None)
            if match is None:
                continue
            if (match.size, match.dtype) != (part.size, part.dtype):
                calls = {rank: call, part.peer: there.calls[0]}
                self.outcome.mismatches.append(Mismatch(calls, (part.peer,)))
            queue.left.remove(part)
            there.left.remove(match)
            if not there.left:
                self._finish(group, part.peer)
                fresh.append(part.peer)
        if not queue.left:
            self._finish(group, rank)
            fresh.append(rank)
        return fresh

    def _finish(self, group: _Group, rank: int) -> None:
        """Removes the first message of a rank, which has been carried out."""
        queue = group.queues[rank]
        self.done[rank].add(queue.calls.popleft().number)
        queue.left = self._parts(queue.calls[0]) if queue.calls else []
        group.n_ready -= not queue.calls
        self.awake.append(rank)

    # ------------------------------------------------------------------ what is left

    def _find_stops(self) -> None:
        waiting: dict[tuple[int, int], Place] = {}
        for rank, events in self.programs.items():
            if self.at[rank] < len(events):
                event = events[self.at[rank]]
                assert isinstance(event, Wait)
                waiting[rank, event.number] = event.place
        for group in self.groups.values():
            for rank, queue in group.queues.items():
                for call in queue.calls:
                    place = waiting.get((rank, call.number))
                    # A message that nobody waits for is only reported if it is left over at the
                    # end.
                    if place is None and (rank not in self.outcome.ended or call != queue.calls[0]):
                        continue
                    first, missing = queue.calls[0], self._missing(group, rank)
                    answers = {
                        other: (answer, calls[0])
                        for other in set(missing) & set(group.queues)
                        for calls in [group.queues[other].calls]
                        if (answer := next((c for c in calls if _answers(c, first, rank)), None))
                    }
                    self.outcome.stops.append(Stop(rank, place, call, first, missing, answers))

    def _missing(self, group: _Group, rank: int) -> tuple[int, ...]:
        """Returns the members that have not come to the first message of a rank."""
        queue = group.queues[rank]
        if queue.calls[0].op == "p2p":
            return tuple(sorted({part.peer for part in queue.left}))
        op = queue.calls[0].op
        heads = {r: q.calls[0].op if q.calls else "" for r, q in group.queues.items()}
        return tuple(r for r, head in heads.items() if head != op)


def _answers(one: Start, call: Start, rank: int) -> bool:
    """Returns whether `one`, on another rank, belongs to `call` on this rank."""
    if call.op != "p2p" or one.op != "p2p":
        return one.op == call.op
    wanted = {part.what for part in call.parts}
    return any(part.peer == rank and {part.what} != wanted for part in one.parts)


def _counts(programs: Mapping[int, Sequence[SingleEvent]]) -> dict[str, Counter[int]]:
    counts: dict[str, Counter[int]] = {}
    for rank, events in programs.items():
        for event in events:
            if isinstance(event, Start) and event.op != "p2p":
                here = {member: 0 for member in event.ranks if member in programs}
                counts.setdefault(event.group, Counter(here))[rank] += 1
    return counts


def _different(calls: Calls) -> tuple[int, ...]:
    """Returns the ranks whose call does not fit those of the majority."""
    if all(call.pieces is not None for call in calls.values()):
        return _pieces_apart(calls)
    kinds = {rank: (call.op, call.size, call.dtype, call.how) for rank, call in calls.items()}
    (usual, _), *others = Counter(kinds.values()).most_common()
    return tuple(rank for rank, kind in kinds.items() if kind != usual) if others else ()


def _pieces_apart(calls: Calls) -> tuple[int, ...]:
    """Returns the ranks that do not send in an all-to-all what another one receives."""
    ranks = next(iter(calls.values())).ranks
    different = set()
    for (i, one), (j, other) in itertools.permutations(enumerate(ranks), 2):
        if one in calls and other in calls:
            sends, receives = calls[one].pieces, calls[other].pieces
            assert sends is not None
            assert receives is not None
            if calls[one].dtype != calls[other].dtype or sends[0][j] != receives[1][i]:
                different.add(other)
    return tuple(sorted(different))
