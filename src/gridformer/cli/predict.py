"""`gridformer check`, `memory` and `predict`: what a step of a run does, before it is launched."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from gridformer.cli.shared import (
    AsJson,
    Overrides,
    Routing,
    RunFile,
    Seconds,
    in_dtype,
    state_routing,
    time_limit,
    waiting,
)
from gridformer.utils.errors import require
from gridformer.utils.files import check_output, write_text
from gridformer.utils.process import last_work
from gridformer.utils.units import GIB

_FEWER = "take fewer layers, stages or micro-batches"


@last_work()
def check(
    run: RunFile,
    overrides: Overrides = None,
    whole: bool = False,
    as_json: AsJson = False,
    seconds: Seconds = None,
    routing: Routing = None,
) -> None:
    """Check that a run will work on GPUs, before anything is launched.

    This runs the real code of one optimizer step for the ranks of the layout, on tensors that claim
    to be on GPUs, and replays all messages by NCCL's rules. It finds messages that do not fit
    together, circular waits, tensors on the wrong device, and values that are read back too often.
    It needs neither GPUs nor the data. The exit code is 1 if there is a problem.

    [bold]Examples:[/bold]

    gridformer check gpt2-124m

    gridformer check mine.yaml layout.pp=4 layout.micro_batches=8

    gridformer check gpt2-124m train.global_batch=32 --json

    Args:
        whole: Trace all ranks, layers and micro-batches one by one, not equal ones once.
    """
    from rich.console import Console

    from gridformer.launch.plan import read_run_without_data

    checked = read_run_without_data(run, overrides or [])
    state_routing(routing)

    from gridformer.check import check_step
    from gridformer.check.report import print_report

    if whole and seconds is None:
        seconds = 0.0  # whoever asks for everything has the time
    fewer = "leave --whole out" if whole else _FEWER
    with Console(stderr=True).status("tracing a step"), time_limit(seconds, fewer):
        report = check_step(checked, whole=whole)
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=1))
    else:
        print_report(checked, report, Console(highlight=False))
    if not report.ok:
        raise typer.Exit(1)


@last_work()
def memory(
    run: RunFile,
    overrides: Overrides = None,
    ranks: str = "",
    budget: Annotated[float, typer.Option(min=0)] = 0.0,
    html: Path | None = None,
    seconds: Seconds = None,
    routing: Routing = None,
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

    Args:
        ranks: The ranks to show, such as 0,5,7, or all. By default, those that hold the most.
        budget: Say whether each rank fits into this number of GiB of a GPU, and if not, what would.
            A shipped model without a run file is then in bfloat16. With train.device=cpu it is a
            CPU's memory.
        html: Write a page that plots memory over time.
    """
    from rich.console import Console

    from gridformer.launch.plan import read_run_without_data
    from gridformer.memory.budget import refusal
    from gridformer.memory.estimate import estimate_ranks
    from gridformer.memory.ranks import chosen_ranks
    from gridformer.memory.room import room_of_budget
    from gridformer.memory.show import print_breakdowns, write_memory_page
    from gridformer.parallel.auto.decisions import decide_run
    from gridformer.plan.predict import on_device_type

    if html is not None:
        require("plotly", "--html", "html")
        check_output("--html", html, [run])
    settings = in_dtype(run, overrides, "bfloat16") if budget else overrides or []
    checked = read_run_without_data(run, settings)
    state_routing(routing)
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
        text = refusal(checked, worst, room, lambda _, doing: tell("", doing))
    console.print(f"It does not fit: {text}", soft_wrap=True)
    words = shlex.join(["gridformer", "plan", str(run), *(overrides or [])])
    console.print(f"On more devices: {words} --devices N --cluster NAME", soft_wrap=True)
    raise typer.Exit(1)


@last_work()
def predict(
    run: RunFile,
    overrides: Overrides = None,
    cluster: Annotated[str, typer.Option(metavar="NAME|FILE")] = "",
    layers_only: bool = False,
    forward_only: bool = False,
    as_json: AsJson = False,
    trace: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    seconds: Seconds = None,
    routing: Routing = None,
) -> None:
    """Predict how long a step of a run takes on a cluster, and where the time goes.

    This runs the real code of one optimizer step for the ranks that differ, on
    fake tensors, and replays its kernels and messages with the times that the
    cluster file gives them. It needs neither the devices nor the data. A shipped model
    without a run file is predicted in the type in which the devices are fastest.

    [bold]Examples:[/bold]

    gridformer predict gpt2-124m train.global_batch=32 --cluster dgx-h100

    gridformer predict mine.yaml layout.cols=4 --cluster selene-a100 --json

    gridformer predict mine.yaml --cluster mine-cluster.yaml --trace step.json

    Args:
        cluster: A cluster file, or the name of a shipped one such as dgx-h100.
        layers_only: Count transformer layers alone, forward and backward: no embedding, head or
            update.
        forward_only: Predict the forward passes of a batch alone.
        trace: Write the timeline as a Chrome trace (Perfetto).
    """
    from rich.console import Console

    from gridformer.cluster.file import cluster_path, load_cluster
    from gridformer.launch.plan import read_run_without_data

    if trace is not None:
        check_output("--trace", trace, [run, cluster_path(cluster) or cluster])
    machine = load_cluster(cluster)
    notes: list[str] = []
    settings = in_dtype(run, overrides, machine.fastest_dtype)
    checked = read_run_without_data(run, settings, notes.append)
    state_routing(routing)

    from gridformer.plan.predict import predict as predicted
    from gridformer.plan.show import print_prediction

    with time_limit(seconds, _FEWER), Console(stderr=True).status("tracing and replaying a step"):
        prediction = predicted(
            checked,
            machine,
            layers_only,
            not forward_only,
            timeline=trace is not None,
            on_all_cores=True,
        )
    prediction.warnings[:0] = notes
    if trace is not None:
        write_text(trace, json.dumps(prediction.chrome_trace()))
    if as_json:
        typer.echo(json.dumps(prediction.to_json(), indent=1))
        return
    print_prediction(checked, machine, prediction, Console(highlight=False))
    if trace is not None:
        typer.echo(f"Timeline: {trace}")
