"""`gridformer average`: the mean of the last checkpoints of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def average(
    run_dir: Annotated[Path, typer.Argument(metavar="RUNDIR", help="A run directory.")],
    out: Annotated[
        Path, typer.Option("--out", help="The run directory to write, which must not exist.")
    ],
    last: Annotated[
        int, typer.Option("--last", help="The number of the newest checkpoints to average.")
    ] = 5,
) -> None:
    """Average the weights of the last checkpoints of a run.

    The original Transformer translates with such a mean. It does not matter which layouts wrote the
    checkpoints. generate, evaluate and export read the written run directory as any other, and
    train.init_from=RUNDIR begins a run with its weights.

    Try: gridformer average runs/translate --last 3 --out runs/translate-average
    """
    from gridformer.checkpoint.average import average_run
    from gridformer.cli.waiting import waiting

    with waiting() as tell:
        done = average_run(run_dir, out, last, lambda doing: tell("", doing))
    steps = ", ".join(map(str, done.steps))
    typer.echo(f"{out}: the mean of the checkpoints of steps {steps}")
