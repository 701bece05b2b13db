"""What `gridformer predict` says, against what is measured on the same machine.

    gridformer calibrate --out h100.yaml
    python -m benchmarks.predicted gpu --cluster h100.yaml --out predicted-h100.md      2 minutes
    python -m benchmarks.predicted machine --out docs/results/predicted.md              12 minutes

`gpu` measures training steps of models on one GPU. `machine` calibrates this machine's CPU, then
measures the layers of `benchmarks.schemes` at 1 to 16 processes, and steps of the demo's model
under 12 layouts. Nothing else should run meanwhile. Progress goes to standard error.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.common.machine import command_line, describe_machine

app = typer.Typer(help=(__doc__ or "").splitlines()[0], add_completion=False)

Out = Annotated[Path | None, typer.Option(help="The Markdown file to write; else it is printed.")]


@app.command()
def gpu(
    cluster: Annotated[Path, typer.Option(help="The file that `gridformer calibrate` wrote.")],
    limit: Annotated[float, typer.Option(help="Seconds that measuring may take in all.")] = 110.0,
    cases: Annotated[int, typer.Option(min=1, help="How many cases, the most telling first.")] = 16,
    quick: Annotated[bool, typer.Option("--quick", help="One case, to try the code.")] = False,
    out: Out = None,
    numbers: Annotated[
        Path | None, typer.Option(help="Append the numbers to this file, a JSON object a line.")
    ] = None,
) -> None:
    """Compare training steps of models on one GPU in bfloat16."""
    from benchmarks.predicted.gpu import compare

    text = compare(cluster, limit, quick, cases, numbers)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    about = describe_machine("benchmarks.predicted")
    head = (
        f"# Predicted and measured on {where}\n\n{about['date']}, torch {about['torch']}, commit "
        f"{about['commit'] or 'unknown'}: `{command_line('benchmarks.predicted')}`. Training "
        "steps in bfloat16, medians of 6 after 3.\n\n"
    )
    _write(head + text, out)


@app.command()
def machine(
    cluster: Annotated[
        Path | None,
        typer.Option(help="A file that `gridformer calibrate` wrote here; else it is measured."),
    ] = None,
    processes: Annotated[
        str, typer.Option(help="Numbers of processes of the layers, out of 1, 4, 9, 16.")
    ] = "1,4,9,16",
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of the layers.")] = 4,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny cases, to try the code.")] = False,
    keep: Annotated[
        Path | None,
        typer.Option(help="A folder for what is measured; what it has is only predicted again."),
    ] = None,
    out: Out = None,
) -> None:
    """Compare layers and steps on this machine's CPU at 1 to 16 processes."""
    from benchmarks.predicted.machine import QUICK, Effort, compare, progress

    load = os.getloadavg()[0]
    counts = [int(word) for word in processes.split(",") if word]
    effort = QUICK if quick else Effort(processes=counts, rounds=rounds)
    text = compare(effort, cluster, keep, progress())
    about = describe_machine("benchmarks.predicted")
    head = (
        f"# Predicted and measured on this machine\n\n{about['date']}: {about['cpu']}, "
        f"{about['cores']} cores, torch {about['torch']}, gloo, commit "
        f"{about['commit'] or 'unknown'}: `{command_line('benchmarks.predicted')}`. When it began, "
        f"{load:.1f} other processes were running or waiting for a core on average. The cluster "
        "file is that of `gridformer calibrate`, measured in the same run"
        f"{'' if cluster is None else f' (no: {cluster})'}. Times are medians.\n\n"
    )
    _write(head + text, out)


def _write(text: str, out: Path | None) -> None:
    if out is None:
        typer.echo(text)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    typer.echo(f"wrote {out}", err=True)


if __name__ == "__main__":
    app()
