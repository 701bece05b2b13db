"""Says why a run hangs, from what its ranks see: a rank is stopped, dead or slow, or orders differ.

A rank waits for the ranks that have not started its message. Following this ends at ranks that wait
for no message, or goes round in a circle. Over NCCL no rank waits in a message; there a rank holds
others up that has started fewer messages of a group, unless a third rank is further behind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gridformer.comm.progress_file import COLLECTIVE, EXCHANGE, SEND, Channel, Lane, Message
from gridformer.launch.hang_report import (
    Kind,
    RankReport,
    Verdict,
    lane_name,
    ranks_in_words,
    wait_in_words,
)

COMPUTES = 0.05  # a rank that uses this share of a core computes
_Cause = tuple[Kind, Sequence[int], str]  # the kind, the culprits and the reason


class _Behind(NamedTuple):
    """A rank that has started fewer messages than `ahead`, which counts them in `lane`."""

    rank: int
    ahead: int
    started: int
    lane: Lane


def diagnose_hang(
    ranks: Mapping[int, RankReport],
    first: int,
    limit: str = "train.timeout_s",
    queued: bool = False,
) -> Verdict:
    """Returns why a run hangs.

    Args:
        ranks: The report of each rank.
        first: The rank that has waited for longer than `limit`, as users call it.
        queued: Whether messages are only queued by the host, as over NCCL.
    """
    run = Messages(ranks)
    kind, culprits, reason = _cause(run, first, limit, queued and ranks[first].wait is None)
    witness = run.witness(culprits, first)
    missing, wait = run.missing(witness), ranks[witness].wait
    members = sorted({witness, *(wait.lane.others if wait else ())})
    arrived = tuple(rank for rank in members if rank not in missing)
    return Verdict(kind, tuple(culprits), reason, witness, arrived, missing)


def _cause(run: Messages, first: int, limit: str, queued: bool) -> _Cause:
    ranks, said = run.ranks, ""
    if stopped := [r for r in ranks if ranks[r].status == "stopped"]:
        pids = " ".join(str(state.pid) for r in stopped if (state := ranks[r].state))
        return "stopped", stopped, (
            f"{run.named(stopped)} stopped, as by SIGSTOP, Ctrl-Z or a debugger (state T); `kill "
            f"-CONT {pids}` lets {'it' if len(stopped) == 1 else 'them'} go on"
        )  # fmt: skip
    if dead := [r for r in ranks if ranks[r].status == "dead"]:
        return "dead", dead, f"{run.named(dead)} dead"
    if mismatch := run.mismatch(first):
        return "diverged", *mismatch
    if queued:
        behind = run.last_ones()
        ends, said = [one.rank for one in behind], _said(run, behind)
    else:
        reached = run.reached(first)
        ends = [rank for rank in reached[1:] if ranks[rank].wait is None]
        if not ends and (circle := run.circle(reached)):
            steps = (
                f"rank {r} waits for {ranks_in_words(run.missing(r))} in {wait_in_words(wait)}"
                for r in circle if (wait := ranks[r].wait)
            )  # fmt: skip
            text = "; ".join(steps)
            return "diverged", circle, f"ranks start messages in different orders: {text}"
    if silent := [r for r in ends if ranks[r].status == "silent"]:
        return "silent", silent, run.silence(silent) + (f"; {said}" if said else "")
    if slow := [r for r in ends if ranks[r].moved or (ranks[r].cpu >= COMPUTES and not queued)]:
        slow = ends if queued else slow
        how = said or "; ".join(
            f"rank {r} used {100 * ranks[r].cpu:.0f}% of a core, and its stack changed "
            f"{ranks[r].moved} times" for r in slow[:4]
        )  # fmt: skip
        return "slow", slow, (
            f"{run.named(slow)} slow, but still compute{'s' * (len(slow) == 1)} ({how}): increase "
            f"{limit} if this is meant to take so long"
        )  # fmt: skip
    if queued and ends:
        return "stuck", ends, f"{said}, and does not go on: see its stack"
    if ends:
        s = "s" * (len(ends) == 1)
        named = run.named(ends, verb=False)
        return "stuck", ends, f"{named} neither compute{s} nor wait{s} for a message: see the stack"
    return "late", (), (
        "all ranks have started the same messages, and a GPU does not finish one: the network does "
        "not deliver, or a kernel does not end"
        if queued
        else "all ranks have started the message by now: the last one came too late, or the "
        "network between them does not deliver"
    )  # fmt: skip


class Messages:
    """The messages of a run, from the reports of its ranks."""

    def __init__(self, ranks: Mapping[int, RankReport]) -> None:
        self.ranks = ranks
        self._channels: dict[Channel, dict[int, Lane]] = defaultdict(dict)
        for rank, report in ranks.items():
            for lane in report.lanes:
                self._channels[lane.channel(rank)][rank] = lane

    def missing(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks that have not started the message for which a rank waits."""
        wait = self.ranks[rank].wait
        if wait is None:
            return ()
        lane, others = wait.lane, [other for other in wait.lane.others if other != rank]
        if lane.kind == EXCHANGE:  # not every rank of the group takes part, so numbers differ
            waits = {r: one.wait.lane.channel(r) for r, one in self.ranks.items() if one.wait}
            return tuple(r for r in others if waits.get(r) != lane.channel(r))
        lanes = self._channels[lane.channel(rank)]
        return tuple(r for r in others if r not in lanes or lanes[r].started < wait.number)

    def mismatch(self, first: int) -> tuple[tuple[int, ...], str] | None:
        """Returns ranks that have started different messages under one number, and the messages."""
        for lanes in sorted(self._channels.values(), key=lambda lanes: first not in lanes):
            by_number: dict[int, dict[Message, list[int]]] = defaultdict(dict)
            for rank, lane in sorted(lanes.items()):
                for number, message in lane.recent.items() if lane.kind != EXCHANGE else ():
                    same = by_number[number]
                    known = next((m for m in same if not _differ(m, message, lane)), message)
                    same.setdefault(known, []).append(rank)
            for number, held in sorted(by_number.items()):
                if len(held) > 1:
                    usual, *others = sorted(held.values(), key=lambda who: (-len(who), who))
                    texts = (f"{what} on {ranks_in_words(who)}" for what, who in held.items())
                    return tuple(sorted({usual[0], *(r for who in others for r in who)})), (
                        f"ranks start different messages: number {number} of "
                        f"{lane_name(lanes[min(lanes)])} is {', but '.join(texts)}"
                    )
        return None

    def reached(self, first: int) -> list[int]:
        """Returns a rank, the ranks for which it waits, those for which these wait, and so on."""
        reached = [first]
        for rank in reached:  # grows meanwhile
            reached += [other for other in self.missing(rank) if other not in reached]
        return reached

    def circle(self, among: Sequence[int]) -> list[int]:
        """Returns ranks of which each waits for the next one, and the last one for the first."""
        after = {rank: self.missing(rank) for rank in among}
        while ended := [r for r, others in after.items() if not any(o in after for o in others)]:
            for rank in ended:
                del after[rank]
        path = [*after][:1]
        while path:
            following = next(other for other in after[path[-1]] if other in after)
            if following in path:
                return path[path.index(following) :]
            path.append(following)
        return []

    def last_ones(self) -> list[_Behind]:
        """Returns the ranks that are behind others, without the ranks that they hold up.

        The ends of messages between two ranks are compared only if no collective differs.
        """
        for kind in (COLLECTIVE, SEND):
            behind: list[_Behind] = []
            held_up = set()
            for lanes in self._channels.values():
                counting = [rank for rank, lane in lanes.items() if lane.kind == kind]
                if not counting:
                    continue
                top = max(counting, key=lambda rank: lanes[rank].started)
                lane = lanes[top]
                known = [r for r in {top, *lane.others} if self.ranks[r].state]
                counts = {r: lanes[r].started if r in lanes else 0 for r in known}
                behind += [_Behind(r, top, n, lane) for r, n in counts.items() if n < lane.started]
                fewest = min(counts.values())
                held_up |= {r for r in counting if counts[r] > fewest}
            if behind:
                gap = max(one.lane.started - one.started for one in behind)
                last = [one for one in behind if one.rank not in held_up] or [
                    one for one in behind if one.lane.started - one.started == gap
                ]
                return sorted({one.rank: one for one in last}.values(), key=lambda one: one.rank)
        return []

    def witness(self, culprits: Sequence[int], first: int) -> int:
        """Returns a rank that waits for a culprit itself, else the rank that noticed the hang."""

        def nearness(rank: int) -> int:
            wait = self.ranks[rank].wait
            if wait is None or self.ranks[rank].status != "answers":
                return 3
            if {*self.missing(rank)} & {*culprits}:
                return 0
            return 1 if {*wait.lane.others} & {*culprits} - {rank} else 2

        return min((first, *self.ranks), key=nearness)

    def silence(self, silent: Sequence[int]) -> str:
        """Returns a sentence about ranks that do not answer."""
        states = [state for r in silent if (state := self.ranks[r].state)]
        why = "the process is stopped or gone, or its machine is out of reach"
        if states:
            why = (
                f"Python has not run there for {max(state.beat_s for state in states):.0f} s: "
                "native code holds Python's lock, or the machine swaps"
            )
        do = "does" if len(silent) == 1 else "do"
        return f"{self.named(silent, verb=False)} {do} not answer{', and' if states else ':'} {why}"

    def named(self, some: Sequence[int], verb: bool = True) -> str:
        """Returns ranks with their processes, and by default `is` or `are`."""
        texts = [self.ranks[r].who for r in some[:4]]
        more = f" and {len(some) - 4} more" if len(some) > 4 else ""
        return ", ".join(texts) + more + (" is" if len(some) == 1 else " are") * verb


def _said(run: Messages, behind: Sequence[_Behind]) -> str:
    """Returns a sentence about ranks that are behind."""
    texts = []
    for one in behind[:4]:
        message = one.lane.recent.get(one.started + 1)
        which = f", so not {message}" if message else ""
        texts.append(
            f"{run.ranks[one.rank].who} has started {one.started} of the {one.lane.started} "
            f"messages that rank {one.ahead} of its group has started{which}"
        )
    return "; ".join(texts) + (f"; and {len(behind) - 4} more" if len(behind) > 4 else "")


def _differ(mine: Message, theirs: Message, lane: Lane) -> bool:
    if mine.size >= 0 and theirs.size >= 0 and mine.size != theirs.size:
        return True
    # The two ends of a message between two ranks may have different labels.
    return lane.kind == COLLECTIVE and replace(mine, size=0) != replace(theirs, size=0)
