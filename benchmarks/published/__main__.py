"""The papers' experiments, scaled down to a cluster that is emulated on this machine.

    python -m benchmarks.published --keep FOLDER --out docs/results/published.md
    python -m benchmarks.published --quick                               2 nodes, to try the code

Network namespaces are the nodes, with rate-limited links between them; the processes and everything
that they send are real. It needs root, and the commands ip and tc (apt-get install iproute2).
Nothing else should run meanwhile. The first takes about 25 minutes on two cores. With --keep an
interrupted run goes on where it was, and the page can be written again from what was measured.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common.machine import command_line, describe_machine
from benchmarks.published.comparisons import bubbles_there, comparisons, ratios
from benchmarks.published.elsewhere import There, seconds_there
from benchmarks.published.emulate import Outcome, emulate
from benchmarks.published.figure import plot
from benchmarks.published.plan import PLAN, QUICK
from benchmarks.published.report import report
from gridformer.utils.errors import UserError


def main(
    out: Annotated[
        Path | None,
        typer.Option(
            help="The Markdown file to write, with a figure beside it; else it is printed."
        ),
    ] = None,
    only: Annotated[
        int, typer.Option(min=0, help="Run only this machine, counted from 1; 0: all of them.")
    ] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Two nodes, to try the code.")] = False,
    keep: Annotated[
        Path | None,
        typer.Option(help="A folder for what is measured; what it has is only predicted again."),
    ] = None,
    there: Annotated[
        bool,
        typer.Option(
            "--there/--not-there", help="Whether to predict on the published machines, too."
        ),
    ] = True,
) -> None:
    """Measure layouts on emulated clusters, predict them, and compare."""
    plan = QUICK if quick else PLAN
    machines = [*plan.items()]
    machines = machines[only - 1 : only] if only else machines
    began, load, outcomes = time.monotonic(), os.getloadavg()[0], list[Outcome]()

    def tell(text: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {text}", file=sys.stderr, flush=True)

    try:
        for machine, layouts in machines:
            outcomes += emulate(machine, layouts, keep, tell)
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    known = {(str(one.layout), one.machine) for one in outcomes}
    runs = [
        run
        for one in comparisons()
        if {(str(one.slow), one.machine), (str(one.fast), one.machine)} <= known
        for run in one.there or ()
    ]
    if not quick:
        runs += bubbles_there().values()
    elsewhere = _predicted_there(runs, tell) if there else {}
    about = describe_machine("benchmarks.published")
    head = (
        f"{about['date']}: {about['cpu']}, {about['cores']} cores, torch {about['torch']}, gloo, "
        f"commit {about['commit'] or 'unknown'}: `{command_line('benchmarks.published')}`. When it "
        f"began, {load:.1f} other processes were running or waiting for a core on average."
    )
    found, image = ratios(outcomes, elsewhere), out.with_suffix(".png") if out else None
    text = report(outcomes, found, elsewhere, head, image.name if image else "")
    if out is None or image is None:
        typer.echo(text)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
        plot(outcomes, found, image)


def _predicted_there(runs: list[There], tell: Callable[[str], None]) -> dict[str, float]:
    tell(f"predicting {len({run.key for run in runs})} runs on the published machines")
    found = seconds_there(runs)
    tell("done")
    return found


if __name__ == "__main__":
    typer.run(main)
