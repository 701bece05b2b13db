"""`gridformer average`: the mean of the last checkpoints of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def average(
    run_dir: Annotated[
        Path,
        typer.Argument(
            metavar="RUNDIR", help="A run directory, or a URL like train.checkpoint_to."
        ),
    ],
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
    from gridformer.checkpoint.elsewhere import run_with_checkpoints, url_of
    from gridformer.cli.waiting import waiting
    from gridformer.utils.folders import refuse_existing

    refuse_existing(out)
    with waiting() as tell:

        def doing(what: str) -> None:
            tell("", what)

        with run_with_checkpoints(run_dir, doing, max(1, last)) as found:
            done = average_run(found, out, last, doing, url_of(run_dir) or str(run_dir))
    steps = ", ".join(map(str, done.steps))
    typer.echo(f"{out}: the mean of the checkpoints of steps {steps}")
