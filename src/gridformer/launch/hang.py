"""Says why a run hangs, from what its ranks see: a rank is stopped, dead or slow, or orders differ.

A rank waits for the ranks that have not started the message for which it waits. Following this
from rank to rank ends at those that wait for no message, which hold up all others, or it goes round
in a circle, and then ranks start their messages in different orders.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gridformer.comm.progress_file import (
    COLLECTIVE,
    EXCHANGE,
    RECEIVE,
    SEND,
    Lane,
    Message,
    State,
    WaitingMessage,
)
from gridformer.launch import hang_queued

Kind = Literal["stopped", "dead", "diverged", "silent", "slow", "stuck", "late"]
COMPUTES = 0.05  # a rank that uses this share of a core computes


@dataclass(frozen=True)
class Seen:
    """What is known of one rank.

    Attributes:
        rank: The rank.
        status: Whether it answers; "silent" if it does not, and why is not known.
        state: Its progress, also of a rank that does not answer; None if it cannot be read.
        host: Its machine; empty if that is not known.
        module: Where in the model it is; empty if that is not known.
        moved: How many times its stack changed while it was looked at.
        cpu: Processor time that it used meanwhile, as a share of the time.
        stack: Its stack, the innermost call last.
    """

    rank: int
    status: Literal["answers", "stopped", "dead", "silent"]
    state: State | None = None
    host: str = ""
    module: str = ""
    moved: int = 0
    cpu: float = 0.0
    stack: tuple[str, ...] = ()

    @property
    def wait(self) -> WaitingMessage | None:
        """The message for which it waits; None if it waits for none, or that is not known."""
        return self.state.wait if self.state else None

    @property
    def who(self) -> str:
        """The rank with its process, as a user can find it."""
        if self.state is None:
            return f"rank {self.rank}" + (f" (on {self.host})" if self.host else "")
        on = f" on {self.host}" if self.host else ""
        return f"rank {self.rank} (pid {self.state.pid}{on})"

    @property
    def computes(self) -> bool:
        """Whether its stack changed, or it used `COMPUTES` of a core, while it was looked at."""
        return self.moved > 0 or self.cpu >= COMPUTES


@dataclass(frozen=True)
class Verdict:
    """Why a run hangs.

    Attributes:
        kind: The kind of reason.
        culprits: The ranks that hold up the others.
        reason: One sentence.
        witness: The rank whose message is reported: one that waits for the culprits itself.
        arrived: The ranks that have arrived at this message.
        missing: The ranks that have not.
    """

    kind: Kind
    culprits: tuple[int, ...]
    reason: str
    witness: int
    arrived: tuple[int, ...]
    missing: tuple[int, ...]


def diagnose_hang(
    ranks: Mapping[int, Seen], first: int, limit: str = "train.timeout_s", queued: bool = False
) -> Verdict:
    """Returns why a run hangs.

    Args:
        ranks: What is known of each rank.
        first: The rank that has waited for too long.
        limit: What users call the time that was too long.
        queued: Whether messages are only queued by the host, as over NCCL.
    """

    def verdict(kind: Kind, culprits: Iterable[int], reason: str) -> Verdict:
        found = tuple(culprits)
        witness = _witness(ranks, found, first)
        missing, wait = missing_of(ranks, witness), ranks[witness].wait
        taking_part: tuple[int, ...] = (witness,)
        if wait is not None:
            peers = wait.lane.ranks if wait.lane.peer < 0 else (witness, wait.lane.peer)
            taking_part = tuple(sorted({witness, *peers}))
        arrived = tuple(rank for rank in taking_part if rank not in missing)
        return Verdict(kind, found, reason, witness, arrived, missing)

    if stopped := [r for r, seen in ranks.items() if seen.status == "stopped"]:
        pids = " ".join(str(s.pid) for r in stopped if (s := ranks[r].state))
        return verdict(
            "stopped",
            stopped,
            f"{_named(ranks, stopped)} {_is(stopped)} stopped, as by SIGSTOP, Ctrl-Z or a debugger "
            f"(state T); `kill -CONT {pids}` lets {'it' if len(stopped) == 1 else 'them'} go on",
        )
    if dead := [r for r, seen in ranks.items() if seen.status == "dead"]:
        return verdict("dead", dead, f"{_named(ranks, dead)} {_is(dead)} dead")
    if queued and ranks[first].wait is None:
        return verdict(*_queued(ranks, limit))
    for rank, seen in sorted(ranks.items(), key=lambda one: one[0] != first):
        if found := mismatch(ranks, seen):
            others, reason = found
            return verdict("diverged", sorted({rank, *others}), reason)
    ends, circle = _follow(ranks, first)
    if circle:
        steps = (
            f"rank {r} waits for {ranks_in_words(missing_of(ranks, r))} in {_what(ranks[r].wait)}"
            for r in circle
        )
        return verdict(
            "diverged", circle, "ranks start messages in different orders: " + "; ".join(steps)
        )
    if silent := [r for r in ends if ranks[r].status == "silent"]:
        return verdict("silent", silent, _silence(ranks, silent))
    if slow := [r for r in ends if ranks[r].computes]:
        how = "; ".join(
            f"rank {r} used {100 * ranks[r].cpu:.0f}% of a core, and its stack changed "
            f"{ranks[r].moved} times" for r in slow[:4]
        )  # fmt: skip
        return verdict(
            "slow",
            slow,
            f"{_named(ranks, slow)} {_is(slow)} slow, but still compute{'s' * (len(slow) == 1)} "
            f"({how}): increase {limit} if this is meant to take so long",
        )
    if ends:
        return verdict(
            "stuck",
            ends,
            f"{_named(ranks, ends)} neither compute{'s' * (len(ends) == 1)} nor "
            f"wait{'s' * (len(ends) == 1)} for a message: see the stack",
        )
    return verdict(
        "late",
        (),
        "all ranks have started the message by now: the last one came too late, or the network "
        "between them does not deliver",
    )


def _queued(ranks: Mapping[int, Seen], limit: str) -> tuple[Kind, tuple[int, ...], str]:
    """Returns the kind, the culprits and the reason where hosts only queue messages."""
    if found := hang_queued.different(ranks):
        return "diverged", *found
    last = hang_queued.last_ones(ranks)
    culprits = tuple(one.rank for one in last)
    if not last:
        return "late", (), (
            "all ranks have started the same messages, and a GPU does not finish one: the network "
            "does not deliver, or a kernel does not end"
        )  # fmt: skip
    said = hang_queued.told(last, ranks)
    if silent := [rank for rank in culprits if ranks[rank].status == "silent"]:
        return "silent", tuple(silent), f"{_silence(ranks, silent)}; {said}"
    if any(ranks[rank].moved for rank in culprits):
        return "slow", culprits, (
            f"{said}, and still computes: increase {limit} if this is meant to take so long"
        )  # fmt: skip
    return "stuck", culprits, f"{said}, and does not go on: see its stack"


def _witness(ranks: Mapping[int, Seen], culprits: Sequence[int], first: int) -> int:
    """Returns a rank that waits for one of the culprits itself, else the one that was first."""

    def nearness(rank: int) -> int:
        wait = ranks[rank].wait
        if wait is None or ranks[rank].status != "answers":
            return 3
        if {*missing_of(ranks, rank)} & {*culprits}:
            return 0
        others = wait.lane.ranks if wait.lane.peer < 0 else (wait.lane.peer,)
        return 1 if {*others} & {*culprits} - {rank} else 2

    return min((first, *ranks), key=nearness)


def missing_of(ranks: Mapping[int, Seen], rank: int) -> tuple[int, ...]:
    """Returns the ranks that have not started the message for which a rank waits.

    Args:
        ranks: What is known of each rank.
        rank: The rank that waits.
    """
    wait = ranks[rank].wait
    if wait is None:
        return ()
    lane = wait.lane
    if lane.kind == SEND:
        return _behind(ranks, (lane.peer,), (lane.group, RECEIVE, rank), wait.number)
    if lane.kind == RECEIVE:
        return _behind(ranks, (lane.peer,), (lane.group, SEND, rank), wait.number)
    others = tuple(other for other in lane.ranks if other != rank)
    if lane.kind == EXCHANGE:  # not every rank of the group takes part, so numbers differ
        return tuple(r for r in others if r in ranks and _lane_of(ranks[r]) != lane.key)
    return _behind(ranks, others, lane.key, wait.number)


def mismatch(ranks: Mapping[int, Seen], seen: Seen) -> tuple[tuple[int, ...], str] | None:
    """Returns which ranks have started another message in the place of that for which one waits.

    Args:
        ranks: What is known of each rank.
        seen: The rank that waits.

    Returns:
        These ranks, and a sentence that says which message each of them has started; None if no
        message differs.
    """
    wait = seen.wait
    if wait is None or wait.lane.kind == EXCHANGE:
        return None
    if wait.lane.kind == COLLECTIVE:
        key, others = wait.lane.key, wait.lane.ranks
    else:
        kind = SEND if wait.lane.kind == RECEIVE else RECEIVE
        key, others = (wait.lane.group, kind, seen.rank), (wait.lane.peer,)
    held: dict[Message, list[int]] = defaultdict(list)
    held[wait.message].append(seen.rank)
    differ = []
    for other in others:
        lane = _lanes(ranks, other).get(key)
        theirs = lane.recent.get(wait.number) if lane and other != seen.rank else None
        if theirs is not None:
            if _differ(wait.message, theirs, wait.lane.kind == COLLECTIVE):
                held[theirs].append(other)
                differ.append(other)
            else:
                held[wait.message].append(other)
    if not differ:
        return None
    texts = [f"{message} on {ranks_in_words(sorted(who))}" for message, who in held.items()]
    return tuple(differ), (
        f"ranks start different messages: number {wait.number} of {lane_name(wait.lane)} is "
        + ", but ".join(texts)
    )


def ranks_in_words(ranks: Sequence[int], most: int = 12) -> str:
    """Returns ranks in words, such as `rank 3` or `ranks 0, 1 and 5`.

    Args:
        ranks: The ranks.
        most: How many of them are named.
    """
    names = [str(rank) for rank in ranks[:most]]
    if not names:
        return "no rank"
    if len(names) == 1:
        return f"rank {names[0]}"
    if len(ranks) > most:
        return f"ranks {', '.join(names)} and {len(ranks) - most} more"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def progress_line(seen: Seen, trains: bool = True) -> str:
    """Returns in one line where a rank is; `trains` says whether there are steps."""
    state = seen.state
    if state is None:
        return f"{seen.who}: nothing is known of it"
    step = f"step {state.step}, " if state.step else "before the first step, " * trains
    module = f"in {seen.module}, " if seen.module else ""
    if wait := state.wait:
        return f"{seen.who}: {step}{module}{_what(wait)}, for {wait.seconds:.1f} s"
    last = max(state.lanes.values(), key=lambda lane: lane.started, default=None)
    done = f"; {last.started} messages of {lane_name(last)}" if last else ""
    return f"{seen.who}: {step}{module}waits for no message{done}"


def _what(wait: WaitingMessage | None) -> str:
    if wait is None:
        return "no message"
    return f"{wait.message}, number {wait.number} of {lane_name(wait.lane)}"


def lane_name(lane: Lane) -> str:
    """Returns who counts the messages of a lane, such as `ranks 0 and 1`."""
    if lane.kind == SEND:
        return f"those to rank {lane.peer}"
    if lane.kind == RECEIVE:
        return f"those from rank {lane.peer}"
    return f"{ranks_in_words(lane.ranks)}"


def _differ(mine: Message, theirs: Message, is_collective: bool) -> bool:
    if mine.size >= 0 and theirs.size >= 0 and mine.size != theirs.size:
        return True
    # The two ends of a message between two ranks may have different labels.
    return is_collective and replace(mine, size=0) != replace(theirs, size=0)


def _behind(
    ranks: Mapping[int, Seen], others: Iterable[int], key: tuple[str, str, int], number: int
) -> tuple[int, ...]:
    found = []
    for other in others:
        lane = _lanes(ranks, other).get(key)
        if lane is None or lane.started < number:
            found.append(other)
    return tuple(found)


def _lanes(ranks: Mapping[int, Seen], rank: int) -> dict[tuple[str, str, int], Lane]:
    seen = ranks.get(rank)
    return seen.state.lanes if seen and seen.state else {}


def _lane_of(seen: Seen) -> tuple[str, str, int] | None:
    return seen.wait.lane.key if seen.wait else None


def _follow(ranks: Mapping[int, Seen], first: int) -> tuple[list[int], list[int]]:
    """Follows who waits for whom from a rank on.

    Returns:
        The ranks at which this ends, and a circle if it ends nowhere.
    """
    ends: list[int] = []
    path: list[int] = []
    circle: list[int] = []
    done: set[int] = set()

    def visit(rank: int) -> None:
        if rank in done or (circle and rank in circle):
            return
        if rank in path:
            circle.extend(path[path.index(rank) :])
            return
        path.append(rank)
        waits_for = missing_of(ranks, rank) if rank in ranks else ()
        if rank != first and (rank not in ranks or ranks[rank].wait is None):
            ends.append(rank)
        for other in waits_for:
            if not circle:
                visit(other)
        path.pop()
        done.add(rank)

    visit(first)
    return ([], circle) if circle and not ends else (ends, [])


def _silence(ranks: Mapping[int, Seen], silent: Sequence[int]) -> str:
    states = [s for r in silent if (s := ranks[r].state)]
    if states:
        quiet = max(state.beat_s for state in states)
        return (
            f"{_named(ranks, silent)} {'does' if len(silent) == 1 else 'do'} not answer, and "
            f"Python has not run there for {quiet:.0f} s: native code holds Python's lock, or the "
            "machine swaps"
        )
    return (
        f"{_named(ranks, silent)} {'does' if len(silent) == 1 else 'do'} not answer: the process "
        "is stopped or gone, or its machine is out of reach"
    )


def _named(ranks: Mapping[int, Seen], some: Sequence[int]) -> str:
    texts = [ranks[r].who if r in ranks else f"rank {r}" for r in some[:4]]
    more = f" and {len(some) - 4} more" if len(some) > 4 else ""
    return ", ".join(texts) + more


def _is(some: Sequence[int]) -> str:
    return "is" if len(some) == 1 else "are"
