"""`gridformer train`: a run file in, a run directory out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def train(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN.yaml", help="A run file, or the name of a shipped one: demo."),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="Values to use instead of the file's: train.steps=100."
        ),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", min=1, help="Processes; must be what the layout needs."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Run directory; without it runs/NAME.")
    ] = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Print what the layout's auto comes to, and stop there."),
    ] = False,
) -> None:
    """Train a model, or go on where its run directory left off.

    Starts as many processes as the layout needs, on this machine; under torchrun
    or srun it joins those that they started.
    Ctrl-C saves a checkpoint first; the same command then goes on from it.

    [bold]Examples:[/bold]

    gridformer train demo

    gridformer train my.yaml train.steps=100 layout.rows=2 layout.cols=2

    gridformer train my.yaml --explain

    torchrun --nnodes 2 --nproc-per-node 4 -m gridformer train my.yaml
    """
    from gridformer.cli.waiting import waiting
    from gridformer.config import load_run
    from gridformer.mesh.launch_env import joined
    from gridformer.utils.forkserver import warm_up

    overrides = overrides or []
    if explain:
        from rich.console import Console

        from gridformer.launch.plan import read_run
        from gridformer.parallel.auto.decisions import decide_run, print_decisions

        checked = read_run(run, overrides)
        print_decisions(checked, decide_run(checked), Console())
        return
    if not joined() and load_run(run, overrides).layout.n_processes > 1:
        warm_up("gridformer.launch.run")  # loads beside this process's own imports

    from gridformer.launch.plan import plan_run
    from gridformer.launch.run import execute

    with waiting() as tell:
        plan = plan_run(run, overrides, nproc, out, tell)
    execute(plan)
