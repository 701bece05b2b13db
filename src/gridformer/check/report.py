"""Checks a run before it starts: whether NCCL can carry out its messages."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Any

from rich.console import Console
from rich.text import Text

from gridformer.check.messages import message_problems
from gridformer.check.problems import KINDS, Problem, each_once, rank_ranges
from gridformer.check.simulate import simulate
from gridformer.config import RunConfig
from gridformer.parallel.auto.decisions import Decisions, decide_run
from gridformer.parallel.axes import mesh_ranks
from gridformer.parallel.data.gradients import LABEL
from gridformer.parallel.registry import describe_layout
from gridformer.record import Place, Read, Trace, Trouble
from gridformer.record.events import SingleEvent, Start
from gridformer.record.itineraries import alike_stages
from gridformer.record.rank import Extent, RecordOptions, record_ranks

MOST = 64  # with more passes of all ranks in a step, equal ranks are traced once
_TROUBLES = {
    "device": "this is an error of gridformer and not of the run file: please report it",
    "contiguity": "this is an error of gridformer and not of the run file: please report it",
    "size": "use sizes that the axis divides, and please report this",
    "error": "please report this, with the run file",
    "untraced": "the run may work; please report this, with the run file",
}

_CREATED = Place("mesh/groups.py", 0, "make_groups")


@dataclass
class Report:
    """The result of a check.

    Attributes:
        problems: The problems that were found.
        traced: The ranks that were traced.
        n_ranks: The number of ranks of the run.
        n_messages: The number of messages that the traced ranks start.
        reads: Where the host reads values back from the device, and how often in a step.
    """

    problems: list[Problem]
    traced: list[int]
    n_ranks: int
    n_messages: int
    reads: dict[Place, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether no problem was found, not even one with which the run works."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """Returns what `gridformer check --json` prints."""
        return {
            "ok": self.ok,
            "problems": [problem.as_json() for problem in self.problems],
            "ranks": self.n_ranks,
            "traced": len(self.traced),
            "messages": self.n_messages,
            "read_backs": [
                {"file": place.file, "line": place.line, "function": place.function, "times": n}
                for place, n in self.reads.items()
            ],
        }


def check_step(
    run: RunConfig,
    decisions: Decisions | None = None,
    whole: bool = False,
    most: int = MOST,
    limit_s: float = math.inf,
) -> Report:
    """Checks one optimizer step of a run on GPUs, without a GPU.

    It registers a device type in this process, which must not belong to a process group.

    Args:
        run: The checked run.
        decisions: The result of `decide_run(run)`; None calls it.
        whole: Whether all ranks, layers and micro-batches run one by one; otherwise few layers and
            passes run, and stand for equal ones.
        most: With more passes of all ranks than these, few ranks stand for all.
        limit_s: No rank is begun after this many seconds.
    """
    decisions = decisions or decide_run(run)
    ranks = sample_ranks(run, decisions, math.inf if whole else most)
    extent: Extent = "complete" if whole else "few layers"
    how = RecordOptions(extent=extent, until=time.monotonic() + limit_s)
    records = record_ranks(run, ranks, decisions, how, beside=True)
    traces = [one.trace for one in records if one.trace.complete or one.trace.troubles]
    return report_of(run, traces)


def report_of(run: RunConfig, traces: Sequence[Trace]) -> Report:
    """Returns the report for the traces of ranks that represent all ranks of a run.

    Args:
        run: The run.
        traces: Traces of one step. Their messages are compared if all of them are complete.
    """
    problems = [*_own(run, traces)]
    # The members of a group have the same schedule, so that such parts fit again.
    programs = {trace.rank: [*trace.unfolded(once=True)] for trace in traces}
    # What a rank does after an error is not known, so nothing can be said about ranks that wait for
    # it.
    if all(trace.complete for trace in traces):
        problems += [*_groups(traces), *_calls(run, traces), *_drift(programs)]
        problems += message_problems(simulate(among(programs)))
    starts = sum(isinstance(event, Start) for events in programs.values() for event in events)
    fullest = max((trace.reads for trace in traces), key=len, default=[])
    reads: dict[Place, int] = {}
    for read in fullest:
        reads[read.place] = reads.get(read.place, 0) + 1
    ranks = [trace.rank for trace in traces]
    return Report(each_once(problems), ranks, run.layout.n_processes, starts, reads)


def _own(run: RunConfig, traces: Sequence[Trace]) -> Iterator[Problem]:
    """Returns the problems that each rank has by itself, for all its ranks together."""
    troubles: dict[Trouble, list[int]] = {}
    reads: dict[Place, list[int]] = {}
    for trace in traces:
        for trouble in dict.fromkeys(trace.troubles):
            troubles.setdefault(trouble, []).append(trace.rank)
        for place in dict.fromkeys(read.place for read in _unwanted(run, trace.reads)):
            reads.setdefault(place, []).append(trace.rank)
    for found, ranks in troubles.items():
        text, help_ = found.text, _TROUBLES[found.kind]
        yield Problem(found.kind, tuple(ranks), found.place, text, help_, found.axis)
    for place, ranks in reads.items():
        text = (
            "a value is read back from the device, for which the host waits until all kernels are "
            "done. A step should not do this: its result is copied to the host without waiting"
        )
        yield Problem("read-back", tuple(ranks), place, text, _TROUBLES["error"])


def _unwanted(run: RunConfig, reads: Sequence[Read]) -> list[Read]:
    """Returns the read-backs that a step should not have.

    Offloading copies optimizer states to the host.
    """
    return [read for read in reads if not read.copies or run.train.offload == "none"]


def _groups(traces: Sequence[Trace]) -> Iterator[Problem]:
    """Returns a problem if not all ranks create the same groups in the same order."""
    for first, trace in pairwise(traces):
        pairs = zip_longest(first.groups, trace.groups)
        one, other = next((pair for pair in pairs if pair[0] != pair[1]), (None, None))
        if one is other is None:
            continue
        said = [
            f"rank {t.rank} creates "
            + (f"{g.n} group{'s' * (g.n > 1)} for {g.purpose}" if g else "no more groups")
            for t, g in ((first, one), (trace, other))
        ]
        alike = " of other ranks" if one and other and one[:2] == other[:2] else ""
        text = f"{said[0]}, but {said[1]}{alike}"
        yield Problem("groups", (first.rank, trace.rank), _CREATED, text, _TROUBLES["device"])
        return


def _calls(run: RunConfig, traces: Sequence[Trace]) -> Iterator[Problem]:
    """Returns a problem for each purpose whose groups are created one by one.

    A call creates the groups of all places in the other axes. Where there is but one such place,
    several calls for the pipeline's axis have different stages.
    """
    if run.layout.n_processes == run.layout.pp:
        return
    first = traces[0]
    for groups in first.groups:
        if groups.n == groups.calls > 1:
            text = (
                f"{groups.calls} calls create the {groups.n} groups for {groups.purpose}, one for "
                "each. Over NCCL a call is a collective of all ranks, so a start takes longer the "
                "more ranks there are"
            )
            ranks = tuple(trace.rank for trace in traces)
            yield Problem("calls", ranks, _CREATED, text, _TROUBLES["error"], groups.purpose)


def _drift(programs: Mapping[int, Sequence[SingleEvent]]) -> Iterator[Problem]:
    """Returns problems of ranks that sum gradients over stages before they do over replicas.

    Every stage then sums equal terms over its replicas, but the ring of each may begin at another
    rank and so round in another order.
    """
    found: dict[tuple[Place, Place, str], list[int]] = {}
    for rank, events in programs.items():
        early = None
        for event in events:
            if not isinstance(event, Start) or event.label != LABEL or event.op == "p2p":
                continue
            if event.axis == "pp":
                early = early or event
            elif early:
                found.setdefault((early.place, event.place, event.axis), []).append(rank)
                break
    for (stages, replicas, axis), ranks in found.items():
        text = (
            f"gradients are summed over the stages that share a parameter at {stages}, and only "
            f"then over {axis} at {replicas}. The stages may round the second sum differently, so "
            "their copies of the parameter drift apart"
        )
        yield Problem("drift", tuple(ranks), stages, text, _TROUBLES["device"], "pp")


# ----------------------------------------------------------------- ranks that stand for all


def sample_ranks(run: RunConfig, decisions: Decisions, most: float = MOST) -> list[list[int]]:
    """Returns the ranks that represent all ranks of a run.

    Every stage of a pipeline has an order of messages of its own, so the first rank of each is
    among them. On the first and the last stage, so are the ranks that are last along one other
    axis, each of which is in a group with the first rank.

    Args:
        run: The run.
        decisions: The result of `decide_run`.
        most: If all ranks together have at most this many passes, all ranks are returned, each in a
            list of its own. Without a pipeline, all micro-batches count as one pass.

    Returns:
        Lists of ranks that differ only in their place along pp and whose stages have equal layers.
    """
    layout = run.layout
    passes = layout.micro_batches * layout.stages_per_rank if layout.pp > 1 else 1
    if layout.n_processes * passes <= most:
        return [[rank] for rank in range(layout.n_processes)]
    mesh = mesh_ranks(layout, decisions.block)
    found = [
        [int(mesh[place].flatten()[0]) for place in places]
        for places in alike_stages(run, decisions)
    ]
    others = set()
    for stage in (mesh[0], mesh[-1]):
        for dim, size in enumerate(stage.shape):
            place = [0] * stage.dim()
            place[dim] = size - 1
            others.add(int(stage[tuple(place)]))
    first = {rank for line in found for rank in line}
    return [*found, *([rank] for rank in sorted(others - first))]


def among(programs: Mapping[int, Sequence[SingleEvent]]) -> dict[int, list[SingleEvent]]:
    """Returns the programs as if there were no other ranks than theirs.

    Groups lose the ranks that were not traced, which do what those do that represent them. Messages
    to and from such ranks are left out.
    """
    known = set(programs)
    return {rank: [_among(event, known) for event in events] for rank, events in programs.items()}


def _among(event: SingleEvent, known: set[int]) -> SingleEvent:
    if not isinstance(event, Start):
        return event
    at = [i for i, rank in enumerate(event.ranks) if rank in known]
    if len(at) == len(event.ranks):
        return event
    pieces = event.pieces
    if pieces is not None:
        sent, received = (tuple(sizes[i] for i in at) for sizes in pieces)
        pieces = sent, received
    return event._replace(
        ranks=tuple(event.ranks[i] for i in at),
        parts=tuple(part for part in event.parts if part.peer in known),
        pieces=pieces,
    )


# --------------------------------------------------------------------------- as text


def print_report(run: RunConfig, report: Report, console: Console) -> None:
    """Prints what a check has found.

    Args:
        run: The run.
        report: Its report.
        console: Where to print.
    """

    def line(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), soft_wrap=True)

    line(f"{run.model.name} on {describe_layout(run.layout)}: one step on GPUs, over NCCL")
    for problem in report.problems:
        axis = f", axis {problem.axis}" if problem.axis else ""
        alike = f" and {problem.alike} more groups alike" if problem.alike else ""
        line("")
        line(f"{KINDS[problem.kind]} ({rank_ranges(problem.ranks)}{alike}{axis})", "bold red")
        line(f"  at: {problem.place}")
        for text in problem.text.splitlines():
            line(f"  {text}")
        line(f"  remedy: {problem.remedy}")
    if report.problems:
        line("")
    reads = ", ".join(
        f"{n} x {place}" if n > 1 else f"{place}" for place, n in report.reads.items()
    )
    line(f"Values read back from the device in a step: {reads or 'none'}.")
    n = len(report.problems)
    ranks = f"{report.n_ranks:,} rank{'s' * (report.n_ranks > 1)}"
    if report.n_ranks != len(report.traced):
        ranks += f", of which {len(report.traced)} were traced"
    said = f"{n} problem{'s' * (n > 1)}" if n else "no problem"
    line(f"Checked {report.n_messages:,} messages of {ranks}: {said}.", "bold")
