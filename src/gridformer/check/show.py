"""Prints the report of a check."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from gridformer.check.problems import KINDS, rank_ranges
from gridformer.check.report import Report
from gridformer.config import RunConfig
from gridformer.parallel.registry import describe_layout


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
