"""What ranks tell each other about a hang, and how it is told to a user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from pydantic import TypeAdapter

from gridformer.comm.progress_file import Lane, State, WaitingMessage

Kind = Literal["stopped", "dead", "diverged", "silent", "slow", "stuck", "late"]
_CALLS = 8  # shown of a stack; the file has them all


@dataclass(frozen=True)
class RankReport:
    """What is known of one rank.

    Attributes:
        rank: The rank.
        status: "answers", "stopped", "dead", or "silent" if it does not answer for unknown reasons.
        state: Its progress, also of a rank that does not answer; None if it cannot be read.
        host: Its machine; empty if that is not known.
        module: Where in the model it is; empty if that is not known.
        moved: How many times its stack changed while it was looked at.
        cpu: Processor time that it used meanwhile, as a share of the time.
        stack: Its calls, the innermost last.
        threads: The calls of its other threads, by name.
        nccl: The messages that NCCL has not finished, if torch tells.
        neighbors: Reports of processes of its machine that cannot tell themselves.
    """

    rank: int
    status: str = "answers"
    state: State | None = None
    host: str = ""
    module: str = ""
    moved: int = 0
    cpu: float = 0.0
    stack: tuple[str, ...] = ()
    threads: dict[str, tuple[str, ...]] = field(default_factory=dict)
    nccl: Any = None
    neighbors: tuple[RankReport, ...] = ()

    @property
    def wait(self) -> WaitingMessage | None:
        """The message for which it waits; None if it waits for none, or that is not known."""
        return self.state.wait if self.state else None

    @property
    def lanes(self) -> Sequence[Lane]:
        """Its messages, as far as they are known."""
        return self.state.lanes if self.state else ()

    @property
    def who(self) -> str:
        """The rank with its process, as a user can find it."""
        pid = f"pid {self.state.pid}" if self.state else ""
        place = f"{pid} on {self.host}".strip() if self.host else pid
        return f"rank {self.rank} ({place})" if place else f"rank {self.rank}"


@cache
def reports() -> TypeAdapter[RankReport]:
    """Returns what turns reports into JSON and back."""
    return TypeAdapter(RankReport)


def all_ranks(told: Mapping[int, RankReport], size: int) -> dict[int, RankReport]:
    """Returns what is known of each rank, from what those that answered have told.

    Args:
        told: The reports of the ranks that answered, by rank. They also tell of their neighbors.
        size: The number of ranks.
    """
    of_others = {other.rank: other for report in told.values() for other in report.neighbors}
    unknown = {rank: RankReport(rank, "silent") for rank in range(size)}
    return {**unknown, **of_others, **told}


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


def hang_text(
    ranks: Mapping[int, RankReport], verdict: Verdict, first: int, limit: str, trains: bool
) -> str:
    """Returns what a user reads last.

    Args:
        ranks: What is known of each rank.
        verdict: Why the run hangs.
        first: The rank that has noticed it.
        limit: The limit for which it has waited, such as `train.timeout_s=600`.
        trains: Whether the run has steps.
    """
    witness, lines = ranks[verdict.witness], []
    for rank in dict.fromkeys([witness.rank, *verdict.culprits[:3]]):
        lines += _stack_text(ranks[rank])
    lines.append(f"The run hangs: {verdict.reason}.")
    if (wait := witness.wait) is not None:
        step = f", in step {witness.state.step}" if witness.state and witness.state.step else ""
        module = f", in {witness.module}" if witness.module else ""
        arrived = ranks_in_words(verdict.arrived)
        if not verdict.missing and verdict.kind != "late":
            arrived += ", which does not mean that each could finish it"
        missing = f" Missing: {ranks_in_words(verdict.missing)}." if verdict.missing else ""
        lines += [
            f"Rank {witness.rank} has waited {wait.seconds:.1f} s ({limit}) in {wait.message}, "
            f"message {wait.number} of {lane_name(wait.lane)}{step}{module}.",
            f"Arrived: {arrived}.{missing}",
        ]
    else:
        lines.append(
            f"Rank {first} has been in one place for that long ({limit}). Over NCCL a process does "
            "not wait in a message but where it reads from the GPU, and the messages below may "
            "have been started, not finished."
        )
    others = [rank for rank in sorted(ranks) if rank != witness.rank]
    shown = sorted({*others[:8], *verdict.culprits[:8]} - {witness.rank})
    lines += [_progress_line(ranks[rank], trains) for rank in shown]
    if len(others) > len(shown):
        lines.append(f"and {len(others) - len(shown)} other ranks")
    return "\n".join(lines)


def ranks_in_words(ranks: Sequence[int], most: int = 12) -> str:
    """Returns ranks in words, such as `rank 3` or `ranks 0, 1 and 5`.

    Args:
        ranks: The ranks.
        most: How many of them are named.
    """
    names = [str(rank) for rank in ranks[:most]]
    if len(ranks) > most:
        names.append(f"{len(ranks) - most} more")
    if len(names) < 2:
        return f"rank {names[0]}" if names else "no rank"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"


def lane_name(lane: Lane) -> str:
    """Returns who counts the messages of a lane, such as `ranks 0 and 1`."""
    if lane.peer < 0:
        return ranks_in_words(lane.ranks)
    return f"those {'to' if lane.kind == 'send' else 'from'} rank {lane.peer}"


def wait_in_words(wait: WaitingMessage) -> str:
    """Returns which message a rank waits for."""
    return f"{wait.message}, number {wait.number} of {lane_name(wait.lane)}"


def _progress_line(report: RankReport, trains: bool) -> str:
    """Returns in one line where a rank is."""
    state = report.state
    if state is None:
        return f"{report.who}: nothing is known of it"
    step = f"step {state.step}, " if state.step else "before the first step, " * trains
    module = f"in {report.module}, " if report.module else ""
    if wait := state.wait:
        return f"{report.who}: {step}{module}{wait_in_words(wait)}, for {wait.seconds:.1f} s"
    last = max(state.lanes, key=lambda lane: lane.started, default=None)
    done = f"; {last.started} messages of {lane_name(last)}" if last else ""
    return f"{report.who}: {step}{module}waits for no message{done}"


def _stack_text(report: RankReport) -> list[str]:
    """Returns the innermost calls of a rank as lines."""
    stack, age = report.stack, ""
    if report.status != "answers" and report.state:
        stack, age = report.state.stack, f", as it was {report.state.stack_s:.0f} s ago"
    if not stack:
        return []
    calls = "".join(stack[-_CALLS:]).rstrip()
    return [f"Stack of rank {report.rank}{age}:", *calls.splitlines()]
