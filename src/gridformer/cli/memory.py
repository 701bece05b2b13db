"""`gridformer memory`: estimates the memory of each rank of a run without allocating it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gridformer.cli.patience import Seconds, time_limit
from gridformer.cli.run_argument import Overrides, RunFile
from gridformer.utils.process import last_work


@last_work()
def memory(
    run: RunFile,
    overrides: Overrides = None,
    ranks: Annotated[
        str,
        typer.Option(
            "--ranks",
            help="The ranks to show, such as 0,5,7, or all. By default, those that hold the most.",
        ),
    ] = "",
    budget: Annotated[
        float,
        typer.Option(
            "--budget",
            min=0.0,
            help="Say whether each rank fits into this number of GiB of a GPU, and if not, what "
            "would. With train.device=cpu it is a CPU's memory.",
        ),
    ] = 0.0,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page that plots memory over time.")
    ] = None,
    seconds: Seconds = None,
) -> None:
    """Estimate the peak memory of each rank of a run, and when the peak is reached.

    This runs the real code of one optimizer step for some of the ranks, on fake
    tensors without memory and in a process group that sends nothing. It works
    for any layout of any size on one machine, without the data or the devices.

    [bold]Examples:[/bold]

    gridformer memory gpt2-124m

    gridformer memory mine.yaml layout.rows=8 layout.cols=8 --budget 80

    gridformer memory gpt2-124m train.global_batch=32 train.dtype=bfloat16

    gridformer memory mine.yaml train.recompute=full --html memory.html
    """
    from rich.console import Console

    from gridformer.cli.waiting import waiting
    from gridformer.launch.plan import read_run_without_data
    from gridformer.memory.budget import refusal
    from gridformer.memory.estimate import estimate_ranks
    from gridformer.memory.ranks import chosen_ranks
    from gridformer.memory.room import room_of_budget
    from gridformer.memory.show import print_breakdowns, write_memory_page
    from gridformer.parallel.auto.decisions import decide_run
    from gridformer.plan.recorded import on_device_type
    from gridformer.utils.errors import require
    from gridformer.utils.files import check_output
    from gridformer.utils.units import GIB

    if html is not None:
        require("plotly", "--html", "html")
        check_output("--html", html, [run])
    checked = read_run_without_data(run, overrides or [])
    if budget and checked.train.device == "auto":
        checked = on_device_type(checked, "cuda")
    console = Console(highlight=False)
    with time_limit(seconds, "choose some ranks with --ranks, or fewer layers or stages"):
        decisions = decide_run(checked)
        chosen = chosen_ranks(checked, ranks, decisions)
        with console.status(f"simulating a step of {len(chosen)} rank{'s' * (len(chosen) > 1)}"):
            breakdowns = estimate_ranks(checked, [*chosen], decisions)
    print_breakdowns(checked, breakdowns, chosen, console)
    if html is not None:
        write_memory_page(checked, breakdowns, chosen, html)
        console.print(f"Plot of memory over time: {html}")
    gib = budget or checked.train.memory_gib
    if not gib:
        return
    worst = max(breakdowns, key=lambda breakdown: breakdown.needed)
    name = f"the budget of {gib:g} GiB" if budget else f"train.memory_gib={gib:g}"
    room = room_of_budget(gib, name)
    if worst.needed <= room.n_bytes:
        copies = " with the copies while it saves" if worst.needed > worst.peak else ""
        used = f"{worst.needed / GIB:.3g} of {gib:g} GiB"
        console.print(f"It fits: the largest peak{copies} is {used}.")
        return
    with waiting() as tell:
        text = refusal(checked, worst, room, tell)
    console.print(f"It does not fit: {text}", soft_wrap=True)
    raise typer.Exit(1)
