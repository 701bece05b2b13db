"""`gridformer health`: whether a run is alive, for probes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def health(
    run_dir: Annotated[Path, typer.Argument(metavar="RUNDIR")],
    max_age_s: Annotated[float | None, typer.Option(min=0.0)] = None,
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
