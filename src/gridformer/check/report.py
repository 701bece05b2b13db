"""Checks a run before it starts: whether NCCL can carry out its messages."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Any

from rich.console import Console
from rich.text import Text

from gridformer.check.problems import (
    KINDS,
    REPORT,
    Problem,
    each_once,
    message_problems,
    rank_ranges,
)
from gridformer.check.simulate import simulate
from gridformer.config import RunConfig
from gridformer.parallel.auto.decisions import Decisions, decide_run
from gridformer.parallel.axes import mesh_ranks
from gridformer.parallel.data.gradients import LABEL
from gridformer.parallel.registry import describe_layout
from gridformer.record import Place, Trace, Trouble
from gridformer.record.events import SingleEvent, Start
from gridformer.record.itineraries import alike_stages
from gridformer.record.rank import record_ranks
from gridformer.record.routing import routing_notes
from gridformer.record.step import Extent, RecordOptions
from gridformer.utils.units import counted

MOST = 16  # with more passes of all ranks in a step, equal ranks are traced once
_TROUBLES = {
    "device": REPORT,
    "contiguity": REPORT,
    "size": "use sizes that the axis divides, and please report this",
    "error": "please report this, with the run file",
    "untraced": "the run may work; please report this, with the run file",
}

_CREATED = Place("mesh/groups.py", 0, "make_groups")


@dataclass
class Report:
    """The result of a check.

    Attributes:
        n_messages: How many messages the traced ranks start.
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
    """Returns the report for traces of one step of ranks that represent all ranks of a run.

    Their messages are compared if all of them are complete.
    """
    problems = [*_own(run, traces)]
    # What a rank does after an error is not known, so nothing can be said about ranks that wait for
    # it.
    complete = all(trace.complete for trace in traces)
    # Parts that occur again are left out, unless that leaves something else. A member of a group
    # may wait inside a part for what another one does not, such as a message between stages.
    for once in (True, False):
        programs = {trace.rank: [*trace.unfolded(once)] for trace in traces}
        between = [*_drift(programs), *message_problems(simulate(programs))] if complete else []
        if not between:
            break
    problems += [*(_groups(traces) if complete else ()), *between]
    starts = sum(isinstance(event, Start) for events in programs.values() for event in events)
    fullest = max((trace.reads for trace in traces), key=len, default=[])
    reads = Counter(read.place for read in fullest)
    ranks = [trace.rank for trace in traces]
    return Report(each_once(problems), ranks, run.layout.n_processes, starts, dict(reads))


def _own(run: RunConfig, traces: Sequence[Trace]) -> Iterator[Problem]:
    """Returns the problems that each rank has by itself, for all its ranks together."""
    troubles: dict[Trouble, list[int]] = {}
    reads: dict[Place, list[int]] = {}
    for trace in traces:
        for trouble in dict.fromkeys(trace.troubles):
            troubles.setdefault(trouble, []).append(trace.rank)
        # Offloading copies optimizer states to the host.
        unwanted = [r for r in trace.reads if not r.copies or run.train.offload == "none"]
        unwanted = [read for read in unwanted if not read.needed]
        for place in dict.fromkeys(read.place for read in unwanted):
            reads.setdefault(place, []).append(trace.rank)
    for trouble, ranks in troubles.items():
        kind, text = trouble.kind, trouble.text
        yield Problem(kind, tuple(ranks), trouble.place, text, _TROUBLES[kind], trouble.axis)
    for place, ranks in reads.items():
        text = (
            "a value is read back from the device, for which the host waits until all kernels are "
            "done. A step should not do this: its result is copied to the host without waiting"
        )
        yield Problem("read-back", tuple(ranks), place, text, _TROUBLES["error"])


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
        yield Problem("groups", (first.rank, trace.rank), _CREATED, text, REPORT)
        return


def _drift(programs: Mapping[int, Sequence[SingleEvent]]) -> Iterator[Problem]:
    """Returns problems of ranks that sum gradients over stages before they do over replicas.

    Every stage then sums equal terms over its replicas, but the ring of each may begin at another
    rank and so round in another order.
    """
    early_sums: dict[tuple[Place, Place, str], list[int]] = {}
    for rank, events in programs.items():
        early = None
        for event in events:
            if not isinstance(event, Start) or event.label != LABEL or event.op == "p2p":
                continue
            if event.axis == "pp":
                early = early or event
            elif early:
                early_sums.setdefault((early.place, event.place, event.axis), []).append(rank)
                break
    for (stages, replicas, axis), ranks in early_sums.items():
        text = (
            f"gradients are summed over the stages that share a parameter at {stages}, and only "
            f"then over {axis} at {replicas}. The stages may round the second sum differently, so "
            "their copies of the parameter drift apart"
        )
        yield Problem("drift", tuple(ranks), stages, text, REPORT, "pp")


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
            list of its own. Without a pipeline, all micro-batches count as one pass. Otherwise
            those in one list differ only in their place along pp, and have equal layers.
    """
    layout = run.layout
    passes = layout.micro_batches * layout.stages_per_rank if layout.pp > 1 else 1
    if layout.n_processes * passes <= most:
        return [[rank] for rank in range(layout.n_processes)]
    mesh = mesh_ranks(layout, decisions.block)
    lines = [
        [int(mesh[place].flatten()[0]) for place in places]
        for places in alike_stages(run, decisions)
    ]
    others = {
        int(stage.movedim(dim, 0).flatten(1)[-1, 0])
        for stage in (mesh[0], mesh[-1])
        for dim in range(stage.dim())
    }
    others -= {rank for line in lines for rank in line}
    return [*lines, *([rank] for rank in sorted(others))]


# --------------------------------------------------------------------------- as text


def print_report(run: RunConfig, report: Report, console: Console) -> None:
    """Prints what a check of a run has found."""

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
    for note in routing_notes(run):
        line(f"({note})")
    n = len(report.problems)
    ranks = f"{report.n_ranks:,} rank{'s' * (report.n_ranks > 1)}"
    if report.n_ranks != len(report.traced):
        ranks += f", of which {len(report.traced)} were traced"
    said = f"{n} problem{'s' * (n > 1)}" if n else "no problem"
    line(f"Checked {counted(report.n_messages, 'message')} of {ranks}: {said}.", "bold")
