"""What ranks tell each other about a hang, and how it is told to a user."""

from __future__ import annotations

import linecache
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter

from gridformer.comm.progress_file import Lane, State, WaitingMessage

if TYPE_CHECKING:
    from torch import nn

Kind = Literal["stopped", "dead", "diverged", "silent", "slow", "stuck", "late"]
_CALLS = 8  # shown of a stack; the file has them all
_DEEPEST = 40  # calls that are kept of a stack
_NODES = 200  # of the graph that are looked at to find a parameter


def stack_of(frame: FrameType) -> list[str]:
    """Returns the calls of a thread, the innermost last, as a traceback shows them."""
    calls = []
    for call, number in [*traceback.walk_stack(frame)][:_DEEPEST]:
        name = call.f_code.co_filename
        # Between two lines, such as on leaving a `with`, Python may know none.
        source = linecache.getline(name, number or 0).strip()
        text = f'  File "{name}", line {number or "?"}, in {call.f_code.co_name}\n'
        calls.append(text + (f"    {source}\n" if source else ""))
    return calls[::-1]


def module_of(frame: FrameType, model: nn.Module | None) -> str:
    """Returns the module of a model in which a thread is; empty if it is in none.

    A backward pass has no modules on the stack, but the autograd function that runs: the next
    parameter of its graph belongs to the same module or to the module before it.
    """
    if model is None:
        return ""
    modules = {id(module): name for name, module in model.named_modules()}
    for call, _ in traceback.walk_stack(frame):
        if (name := modules.get(id(call.f_locals.get("self")))) is not None:
            return f"{name or 'the model'} (forward)"
        node = call.f_locals.get("ctx")  # also in the forward pass of an autograd function
        if call.f_code.co_name == "backward" and hasattr(node, "next_functions"):
            parameter = _next_parameter(node, model)
            return f"the backward pass near {parameter}" if parameter else "the backward pass"
    return ""


def _next_parameter(node: Any, model: nn.Module) -> str:
    names = {id(p): name for name, p in model.named_parameters()}
    waiting, seen = deque([node]), {node}
    while waiting and len(seen) < _NODES:
        for function, _ in waiting.popleft().next_functions:
            if function is None or function in seen:
                continue
            if (name := names.get(id(getattr(function, "variable", None)))) is not None:
                return name
            seen.add(function)
            waiting.append(function)
    return ""


@dataclass(frozen=True)
class RankReport:
    """Where one rank is, as far as it is known."""

    rank: int
    # "answers", "stopped", "dead", or "silent" if it does not answer for unknown reasons
    status: str = "answers"
    # Its progress, also of a rank that does not answer; None if it cannot be read
    state: State | None = None
    host: str = ""  # its machine; empty if that is not known
    module: str = ""  # where in the model it is; empty if that is not known
    moved: int = 0  # how many times its stack changed while it was looked at
    cpu: float = 0.0  # processor time that it used meanwhile, as a share of the time
    stack: tuple[str, ...] = ()  # its calls, the innermost last
    # The calls of its other threads, by name
    threads: dict[str, tuple[str, ...]] = field(default_factory=dict)
    nccl: Any = None  # the messages that NCCL has not finished, if torch tells
    # Reports of processes of its machine that cannot tell themselves
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
    """Returns a report of each of `size` ranks, from the reports of the ranks that answered."""
    of_others = {other.rank: other for report in told.values() for other in report.neighbors}
    unknown = {rank: RankReport(rank, "silent") for rank in range(size)}
    return {**unknown, **of_others, **told}


@dataclass(frozen=True)
class Verdict:
    """Why a run hangs."""

    kind: Kind
    culprits: tuple[int, ...]  # the ranks that hold up the others
    reason: str  # one sentence
    witness: int  # the rank whose message is reported, which waits for the culprits itself
    arrived: tuple[int, ...]  # the ranks that have arrived at this message
    missing: tuple[int, ...]  # the ranks that have not


def hang_text(
    ranks: Mapping[int, RankReport], verdict: Verdict, first: int, limit: str, trains: bool
) -> str:
    """Returns what a user reads last."""
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
    """Returns ranks in words, such as `rank 3` or `ranks 0, 1 and 5`; at most `most` are named."""
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
