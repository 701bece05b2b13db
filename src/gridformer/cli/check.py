"""`gridformer check`: verifies a run's messages and devices before anything is launched."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from gridformer.cli.patience import Seconds, time_limit
from gridformer.cli.run_argument import Overrides, RunFile
from gridformer.utils.process import last_work


@last_work()
def check(
    run: RunFile,
    overrides: Overrides = None,
    whole: Annotated[
        bool,
        typer.Option(
            "--whole",
            help="Trace all ranks, layers and micro-batches one by one, not equal ones once.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON object.")
    ] = False,
    seconds: Seconds = None,
) -> None:
    """Check that a run will work on GPUs, before anything is launched.

    This runs the real code of one optimizer step for the ranks of the layout,
    on tensors that claim to be on GPUs, and replays all messages by NCCL's
    rules. It finds messages that do not fit together, circular waits, tensors
    on the wrong device, and values that are read back too often. It needs
    neither GPUs nor the data. The exit code is 1 if there is a problem.

    [bold]Examples:[/bold]

    gridformer check gpt2-124m

    gridformer check mine.yaml layout.pp=4 layout.micro_batches=8

    gridformer check gpt2-124m train.global_batch=32 --json
    """
    from rich.console import Console

    from gridformer.launch.plan import read_run_without_data

    checked = read_run_without_data(run, overrides or [])

    from gridformer.check import check_step
    from gridformer.check.show import print_report

    if whole and seconds is None:
        seconds = 0.0  # whoever asks for everything has the time
    fewer = "leave --whole out" if whole else "take fewer layers, stages or micro-batches"
    with Console(stderr=True).status("tracing a step"), time_limit(seconds, fewer):
        report = check_step(checked, whole=whole, here=True)
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=1))
    else:
        print_report(checked, report, Console(highlight=False))
    if not report.ok:
        raise typer.Exit(1)
