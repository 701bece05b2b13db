"""`gridformer report`: what one run has done, or how several compare, as a table and as a page."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gridformer.cli.shared import LONGEST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gridformer.report.estimates import Estimates
    from gridformer.report.reading import RunReading

_SECONDS = 10.0


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNDIR...")],
    html: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    seconds: Annotated[float, typer.Option(min=0.0, max=LONGEST)] = _SECONDS,
) -> None:
    """Report what one run has done, or how several runs compare.

    The terminal shows a few numbers and the settings that differ. The page of --html
    also has losses, learning rate, norms and speed over steps, tokens or hours, what
    has happened to the run, the timeline of a step (train.trace_step), where its
    communication and memory go, and text that it has generated. It is one file that
    loads nothing from elsewhere.

    [bold]Examples:[/bold]

    gridformer report runs/demo

    gridformer report runs/wide runs/deep --html compared.html

    Args:
        runs: Run directories.
        html: Write a page with curves and timelines.
        seconds: Estimate memory and messages of each run for the page for at most this number of
            seconds of the processor's time; 0 leaves them out.
    """
    from rich.console import Console

    from gridformer.report.reading import read_runs
    from gridformer.report.summary import print_summary
    from gridformer.utils.errors import require
    from gridformer.utils.files import check_output

    if html is not None:
        require("plotly", "--html", "html")
        check_output("--html", html)
    console = Console(highlight=False)
    readings = read_runs(runs)
    print_summary(readings, console)
    if html is None:
        return
    from gridformer.report.page import write_report_page

    estimates: list[Estimates | None] = [None] * len(readings)
    if seconds:
        with Console(stderr=True).status("estimating memory and messages"):
            estimates = _all_estimated(readings, seconds)
    write_report_page(readings, estimates, html)
    console.print(f"The report: {html}", soft_wrap=True)


def _all_estimated(readings: Sequence[RunReading], seconds: float) -> list[Estimates | None]:
    """Returns the estimates of runs, each with a sentence why there are none if it failed."""
    from gridformer.report.estimates import Estimates
    from gridformer.utils.process import as_far_as, can_copy

    work = [partial(_estimated, run) for run in readings]
    if not can_copy():  # nothing can stop them
        return [piece()[0] for piece in work]
    late = Estimates(
        problem=f"not estimated, because this takes more than {seconds:g} seconds of the "
        "processor's time; allow more with --seconds, such as --seconds 600"
    )
    return [done[0] if done else late for done in as_far_as(work, seconds * len(work))]


def _estimated(run: RunReading) -> tuple[Estimates | None]:
    from gridformer.report.estimates import Estimates, estimates_of
    from gridformer.utils.errors import UserError

    if run.config is None:
        return (None,)
    try:
        return (estimates_of(run.config),)
    except UserError as error:
        return (Estimates(problem=f"not estimated, because {error}"),)
