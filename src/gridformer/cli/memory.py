"""`gridformer memory`: what every rank of a run will hold, before any of it is allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def memory(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN.yaml", help="A run file, or a shipped model: gpt2-1.5b."),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Values to use instead of the file's."),
    ] = None,
    ranks: Annotated[
        str,
        typer.Option("--ranks", help="Which: 0,5,7, or all; without it those that hold most."),
    ] = "",
    budget: Annotated[
        float,
        typer.Option("--budget", min=0.0, help="GiB a rank; says whether it fits, and what would."),
    ] = 0.0,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page that shows memory over time.")
    ] = None,
) -> None:
    """Say what each rank of a run holds at its peak, and when that is.

    Runs the real code of one optimizer step for some of the ranks, on tensors
    without memory and in a process group that sends nothing: so any layout of
    any size is answered on one machine, without its data or its devices.

    [bold]Examples:[/bold]

    gridformer memory demo

    gridformer memory my.yaml layout.rows=8 layout.cols=8 --budget 80

    gridformer memory gpt2-124m train.global_batch=32 train.dtype=bfloat16

    gridformer memory my.yaml train.recompute=full --html memory.html
    """
    from rich.console import Console

    from gridformer.cli.waiting import waiting
    from gridformer.launch.plan import read_run_without_data
    from gridformer.memory.budget import Room, refusal
    from gridformer.memory.estimate import estimate_ranks
    from gridformer.memory.ranks import chosen_ranks
    from gridformer.memory.show import print_breakdowns, write_page
    from gridformer.parallel.auto.decisions import decide_run
    from gridformer.utils.extras import require
    from gridformer.utils.units import GIB

    if html is not None:
        require("plotly", "--html", "html")
    checked = read_run_without_data(run, overrides or [])
    decisions = decide_run(checked)
    chosen = chosen_ranks(checked, ranks, decisions)
    console = Console(highlight=False)
    with console.status(f"running a step of {len(chosen)} rank{'s' * (len(chosen) > 1)}"):
        breakdowns = estimate_ranks(checked, [*chosen], decisions)
    print_breakdowns(checked, breakdowns, chosen, console)
    if html is not None:
        write_page(checked, breakdowns, chosen, html)
        console.print(f"Over time: {html}")
    gib = budget or checked.train.memory_gib
    if not gib:
        return
    worst = max(breakdowns, key=lambda breakdown: breakdown.peak)
    if worst.peak <= gib * GIB:
        console.print(f"It fits: the most is {worst.peak / GIB:.3g} of {gib:g} GiB.")
        return
    room = Room(round(gib * GIB), f"{gib:g} GiB is the budget")
    with waiting() as tell:
        text = refusal(checked, worst, room, tell)
    console.print(f"It does not fit: {text}", soft_wrap=True)
    raise typer.Exit(1)
