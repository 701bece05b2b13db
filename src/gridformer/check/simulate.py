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

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gridformer.record.events import Part, Place, SingleEvent, Start, Wait

Calls = dict[int, Start]  # by rank


@dataclass
class Mismatch:
    """A message whose ends do not fit together.

    Attributes:
        calls: The message on each of its ranks.
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
        rank: The rank.
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
        mismatches: Messages whose ends do not fit together.
        stops: One for each rank that does not finish, and for each message left over.
        ended: The ranks that have finished.
        apart: For each group, the first calls that were matched although they come from different
            places in the code, which may be where one rank missed a call.
        counts: For each group, how many collectives each rank starts in a step.
    """

    mismatches: list[Mismatch] = field(default_factory=list)
    stops: list[Stop] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    apart: dict[str, Calls] = field(default_factory=dict)
    counts: dict[str, Counter[int]] = field(default_factory=dict)


@dataclass
class _Queue:
    """The messages of one rank in one group that have not been carried out."""

    calls: deque[Start] = field(default_factory=deque)
    left: list[Part] = field(default_factory=list)  # of the first, those that have no match yet


@dataclass
class _Group:
    ranks: tuple[int, ...]
    queues: dict[int, _Queue]
    n_ready: int = 0  # members with a message
    broken: bool = False


def simulate(programs: Mapping[int, Sequence[SingleEvent]]) -> Outcome:
    """Replays the programs of ranks.

    Args:
        programs: For each rank its events, in order. The ranks of every message must be among them.
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
            group = _Group(call.ranks, {member: _Queue() for member in call.ranks})
            self.groups[call.group] = group
        queue = group.queues[rank]
        queue.calls.append(call)
        if len(queue.calls) == 1:
            queue.left = list(call.parts)
            group.n_ready += 1
            self._carry_out(group, rank)

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
            elif group.n_ready == len(group.ranks):
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
        name = next(iter(calls.values())).group
        if name not in self.outcome.apart and len({_said_at(c) for c in calls.values()}) > 1:
            self.outcome.apart[name] = calls
        for rank in calls:
            self._finish(group, rank)
        return list(calls)

    def _match_parts(self, group: _Group, rank: int) -> list[int]:
        """Carries out messages between this rank and others. Returns whose next is new."""
        queue = group.queues[rank]
        call, found = queue.calls[0], []
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
                found.append(part.peer)
        if not queue.left:
            self._finish(group, rank)
            found.append(rank)
        return found

    def _finish(self, group: _Group, rank: int) -> None:
        """Removes the first message of a rank, which has been carried out."""
        queue = group.queues[rank]
        self.done[rank].add(queue.calls.popleft().number)
        queue.left = list(queue.calls[0].parts) if queue.calls else []
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
                    first = queue.calls[0]
                    missing = self._missing(group, rank)
                    answers = self._answers(group, rank, missing)
                    self.outcome.stops.append(Stop(rank, place, call, first, missing, answers))

    def _missing(self, group: _Group, rank: int) -> tuple[int, ...]:
        """Returns the members that have not come to the first message of a rank."""
        queue = group.queues[rank]
        if queue.calls[0].op == "p2p":
            return tuple(sorted({part.peer for part in queue.left}))
        op = queue.calls[0].op
        heads = {r: q.calls[0].op if q.calls else "" for r, q in group.queues.items()}
        return tuple(r for r, head in heads.items() if head != op)

    def _answers(
        self, group: _Group, rank: int, missing: Sequence[int]
    ) -> dict[int, tuple[Start, Start]]:
        call, found = group.queues[rank].calls[0], {}
        for other in set(missing) & set(group.queues):
            calls = group.queues[other].calls
            answer = next((c for c in calls if _answers(c, call, rank)), None)
            if answer is not None:
                found[other] = answer, calls[0]
        return found


def _answers(one: Start, call: Start, rank: int) -> bool:
    """Returns whether `one`, on another rank, belongs to `call` on this rank."""
    if call.op != "p2p" or one.op != "p2p":
        return one.op == call.op
    wanted = {part.what for part in call.parts}
    return any(part.peer == rank and {part.what} != wanted for part in one.parts)


def _counts(programs: Mapping[int, Sequence[SingleEvent]]) -> dict[str, Counter[int]]:
    found: dict[str, Counter[int]] = {}
    for rank, events in programs.items():
        for event in events:
            if isinstance(event, Start) and event.op != "p2p":
                found.setdefault(event.group, Counter())[rank] += 1
    return found


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
    pieces = [calls[rank].pieces for rank in ranks]
    found = set()
    for i, from_i in enumerate(pieces):
        for j, from_j in enumerate(pieces):
            assert from_i is not None
            assert from_j is not None
            same = calls[ranks[i]].dtype == calls[ranks[j]].dtype
            if i != j and not (same and from_i[0][j] == from_j[1][i]):
                found.add(ranks[j])
    return tuple(sorted(found))


def _said_at(call: Start) -> tuple[str, int, str]:
    return call.place.file, call.place.line, call.label
