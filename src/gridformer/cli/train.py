"""`gridformer train`: trains what a run file describes and writes a run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gridformer.cli.shared import waiting


def train(
    run: Annotated[Path, typer.Argument(metavar="RUN.yaml")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE")] = None,
    nproc: Annotated[int | None, typer.Option(min=1)] = None,
    out: Path | None = None,
    explain: bool = False,
) -> None:
    """Train a model, or resume from the last checkpoint in its run directory.

    This starts as many processes on this machine as the layout needs. Under
    torchrun or srun it joins the processes that they started instead.
    Ctrl-C saves a checkpoint and stops; the same command then resumes from it.

    [bold]Examples:[/bold]

    gridformer train demo

    gridformer train mine.yaml train.steps=100 layout.rows=2 layout.cols=2

    gridformer train mine.yaml --explain

    torchrun --nnodes 2 --nproc-per-node 4 -m gridformer train mine.yaml

    Args:
        run: A run file, or the name of a shipped one such as demo.
        overrides: Values that replace those of the run file, such as train.steps=100.
        nproc: The number of processes. It must be the number that the layout needs, which is also
            the default.
        out: The run directory. The default is runs/NAME.
        explain: Print what the auto settings of the layout resolve to, and exit.
    """
    from gridformer.launch.plan import check_run, plan_checked, plan_together
    from gridformer.launch.processes import warm_up
    from gridformer.launch.run_lock import RunLock
    from gridformer.mesh.launch_env import rank_env
    from gridformer.utils.placeholder_module import DYNAMO

    overrides = overrides or []
    if explain:
        from rich.console import Console

        from gridformer.launch.plan import read_run
        from gridformer.parallel.auto.decisions import decide_run, print_decisions

        checked = read_run(run, overrides)
        print_decisions(checked, decide_run(checked), Console())
        return
    place = rank_env()
    with RunLock() as lock:
        if place and place.size > 1:
            with waiting() as tell:
                plan = plan_together(place, run, overrides, nproc, out, tell, lock)
        else:
            ready = check_run(run, overrides, nproc)  # a refusal does not wait for torch to load
            if ready.layout.n_processes > 1:
                # It runs at the same time as the imports below.
                compiler = [DYNAMO] if ready.train.compile is True else []
                warm_up("gridformer.launch.run", *compiler)
            with waiting() as tell:
                plan = plan_checked(ready, out, tell, lock=lock)

        from gridformer.launch.run import execute

        execute(plan)
