"""`gridformer report`, `health` and `verify`: what run directories tell about their runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gridformer.cli.shared import LONGEST, AsJson, RunDirectory, waiting
from gridformer.utils.errors import UserError, require
from gridformer.utils.files import check_output
from gridformer.utils.process import as_far_as, can_copy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gridformer.report.estimates import Estimates
    from gridformer.report.reading import RunReading


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNDIR...")],
    html: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    seconds: Annotated[float, typer.Option(min=0, max=LONGEST)] = 10.0,
) -> None:
    """Report what one run has done, or how several runs compare.

    The terminal shows a few numbers and the settings that differ. The page of --html also has
    losses, learning rate, norms and speed over steps, tokens or hours, what has happened to the
    run, the timeline of a step (train.trace_step), where its communication and memory go, and text
    that it has generated. It is one file that loads nothing from elsewhere.

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

    if html is not None:
        require("plotly", "--html", "html")
        check_output("--html", html)
    console = Console(highlight=False)
    readings = read_runs(runs)
    print_summary(readings, console)
    if html is None:
        return
    from gridformer.report.page import write_report_page

    with Console(stderr=True).status("estimating memory and messages"):
        estimates = _all_estimated(readings, seconds)
    write_report_page(readings, estimates, html)
    console.print(f"The report: {html}", soft_wrap=True)


def _all_estimated(readings: Sequence[RunReading], seconds: float) -> list[Estimates]:
    """Returns the estimates of runs, each with a sentence why there are none if it failed."""
    from gridformer.report.estimates import Estimates

    if not seconds:
        return [Estimates() for _ in readings]
    work = [partial(_estimated, run) for run in readings]
    if not can_copy():  # nothing can stop them
        return [piece() for piece in work]
    late = Estimates(
        problem=f"not estimated, because this takes more than {seconds:g} seconds of the "
        "processor's time; allow more with --seconds, such as --seconds 600"
    )
    return [estimates or late for estimates in as_far_as(work, seconds * len(work))]


def _estimated(run: RunReading) -> Estimates:
    from gridformer.report.estimates import Estimates, estimates_of

    try:
        return estimates_of(run.config) if run.config else Estimates()
    except UserError as error:
        return Estimates(problem=f"not estimated, because {error}")


def health(
    run_dir: Annotated[Path, typer.Argument(metavar="RUNDIR")],
    max_age_s: Annotated[float | None, typer.Option(min=0)] = None,
) -> None:
    """Say in one line whether a run is alive; exit with 0 if it is and with 1 if not.

    A run writes heartbeat.json to its run directory after each step. It is alive if
    that file is recent, and if its process exists where this command can see it. A
    run that is done counts as alive; one that was stopped or failed does not.

    [bold]Example:[/bold]

    gridformer health runs/demo --max-age-s 120

    Args:
        run_dir: A run directory.
        max_age_s: A run is not healthy if it has said nothing for longer than this number of
            seconds. The default is the run's train.timeout_s.
    """
    from gridformer.train.heartbeat import health_of

    state = health_of(run_dir, max_age_s)
    typer.echo(state.why)
    if not state.ok:
        raise typer.Exit(1)


def verify(
    run_dir: RunDirectory,
    finite: bool = False,
    as_json: AsJson = False,
) -> None:
    """Check every file of a run directory; exit with 0 if all is well and with 1 if not.

    It verifies the manifests, files and checksums of all checkpoints, and that the config, metrics,
    tokenizer and data belong to them. It changes nothing, and works while a run trains.

    [bold]Example:[/bold]

    gridformer verify runs/demo

    gridformer verify s3://bucket/run

    Args:
        finite: Check besides that all numbers in checkpoints are finite.
    """
    from gridformer.checkpoint.copies import url_of
    from gridformer.launch.verify_run import verify_copies, verify_run

    url = url_of(run_dir)
    with waiting() as tell:
        doing = partial(tell, "")
        findings = verify_copies(url, finite, doing) if url else verify_run(run_dir, finite, doing)
    ok = all(finding.ok for finding in findings)
    if as_json:
        shown = {"run_dir": url or str(run_dir), "ok": ok, "findings": [*map(asdict, findings)]}
        typer.echo(json.dumps(shown, indent=2))
    else:
        width = max(len(finding.what) for finding in findings)
        for finding in findings:
            typer.echo(f"{finding.what:{width}}  {'ok ' if finding.ok else 'BAD'}  {finding.note}")
    if not ok:
        raise typer.Exit(1)
