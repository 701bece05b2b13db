"""`gridformer plan`: finds the fastest layouts of a model on a cluster, and says why."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gridformer.utils.short_lived import last_work

if TYPE_CHECKING:
    from gridformer.cluster import Cluster
    from gridformer.config import RunConfig

# When searching ends after the command was called, up to 64 devices and above. It begins a little
# later than its process, and prints a little after that.
_SOON_S, _LATE_S = 8.5, 50.0
_REPORT_S = 25.0  # up to 64 devices for a report, which is to list several layouts
_TOP = 10  # layouts that are listed unless --top says otherwise


@last_work()
def plan(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|RUN", help="The name of a shipped model, or a run file.")
    ],
    cluster: Annotated[
        str,
        typer.Option("--cluster", help="The name of a shipped cluster, or a cluster file."),
    ],
    devices: Annotated[
        int, typer.Option("--devices", min=1, help="The number of devices, one per process.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Values that replace those of the run file."),
    ] = None,
    batch: Annotated[
        int,
        typer.Option(
            "--batch",
            min=0,
            help="The number of sequences in a step over all devices. The default is that of the "
            "run file. For a model it is about half a million tokens, and at least one sequence "
            "for each device.",
        ),
    ] = 0,
    top: Annotated[int, typer.Option("--top", min=1, help="List this number of layouts.")] = _TOP,
    emit: Annotated[
        Path | None, typer.Option("--emit", help="Write the best layout as a run file.")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a report as a page.")] = None,
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds",
            min=0.0,
            help="Trace no layouts that would take longer than this number of seconds. With 0, "
            "tracing stops 9 s after the command began, 25 s with --html, or 50 s for more than 64 "
            "devices, but not before one layout is found.",
        ),
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find the fastest layouts of a model on a cluster, and say what limits each.

    Every arrangement of the devices is estimated by formulas. The best are traced: the
    real code runs on tensors without memory, and its kernels and messages are timed by
    the cluster file. Layouts that do not fit into memory are never listed. Nothing is
    applied: --emit writes a run file to train with.

    [bold]Examples:[/bold]

    gridformer plan gpt2-1.5b --cluster dgx-h100 --devices 8

    gridformer plan mine.yaml --cluster selene-a100 --devices 64 --batch 512 --emit best.yaml
    """
    began = time.monotonic()  # loading torch is a part of the time
    import json

    from rich.console import Console

    from gridformer.cluster.file import cluster_path, load_cluster
    from gridformer.plan.advice import advise
    from gridformer.plan.emit import with_cluster, write_run
    from gridformer.plan.ranking import print_result
    from gridformer.plan.ranking import ranking_as_json as to_json
    from gridformer.plan.remedies import remedies
    from gridformer.plan.search import Search
    from gridformer.plan.second_look import trace_in_time
    from gridformer.plan.tracing import Tracing
    from gridformer.utils.extras import require
    from gridformer.utils.files import check_output

    inputs = [model, cluster_path(cluster) or cluster]
    if html is not None:
        require("plotly", "--html", "html")
        check_output("--html", html, inputs)
    if emit is not None:
        check_output("--emit", emit, inputs)
    machine = load_cluster(cluster)
    notes: list[str] = []
    run = _run(model, overrides or [], machine, devices, batch, notes)
    console = Console(highlight=False, stderr=as_json)
    chosen_by = {"--batch": batch, "--top": top if top != _TOP else 0, "--seconds": seconds}
    how = shlex.join(
        [
            *("gridformer", "plan", model, *(overrides or [])),
            *("--cluster", cluster, "--devices", str(devices)),
            *(word for option, n in chosen_by.items() if n for word in (option, str(n))),
            *("--emit", str(emit)),
        ]
    )
    with console.status("estimating layouts") as status:
        here = time.monotonic()
        soon_s = _SOON_S if html is None else _REPORT_S
        all_s = soon_s if devices <= 64 else _LATE_S
        limit_s = seconds or max(1.0, all_s - (here - began))
        asked = Search(run, machine, devices, named=cluster)
        tracing = Tracing(asked, top, tell=status.update)
        traced = trace_in_time(tracing, limit_s)
        result = tracing.result
        for prediction in filter(None, (one.prediction for one in result.layouts)):
            prediction.warnings[:0] = notes
        advice = [advise(asked, found, traced) for found in result.layouts]
        would_fit = [] if result.layouts else remedies(asked, result.smallest)
        would_fit += [f"{note}." for note in notes if not result.layouts]
        if html is not None:
            from gridformer.plan.html import write_plan_page

            status.update("estimating other batches and numbers of devices")
            write_plan_page(run, machine, devices, result, advice, html, would_fit)
        if result.layouts and emit is not None:
            status.update("trying choices for the cluster")
            chosen = with_cluster(result.layouts[0], machine, cluster)
            write_run(chosen, emit, how)  # before the output, whose reader may stop reading
    if as_json:
        typer.echo(json.dumps(to_json(result, advice, would_fit)))
    elif result.layouts:
        print_result(run, result, advice, machine.name, console)
    else:
        console.print(f"Nothing fits on {devices} devices of {machine.name}.")
        for sentence in would_fit:
            console.print(f"- {sentence}", soft_wrap=True)
    if html is not None and not as_json:
        console.print(f"The report: {html}")
    if result.layouts and emit is not None:
        if chosen is not result.layouts[0]:
            console.print(
                f"The run file sets layout.cluster={cluster}: a step is predicted to take "
                f"{chosen.step_s:.4g} s with it instead of {result.layouts[0].step_s:.4g} s."
            )
        if not as_json:
            console.print(f"The best layout as a run file: {emit}")
    if not result.layouts:
        raise typer.Exit(1)


def _run(
    model: str, overrides: list[str], machine: Cluster, devices: int, batch: int, notes: list[str]
) -> RunConfig:
    """Returns the run to plan: of a run file with its settings, or of a model with defaults."""
    from gridformer.config import model_names
    from gridformer.launch.plan import read_run_without_data
    from gridformer.plan.search import default_batch, fastest_dtype
    from gridformer.utils.errors import ConfigError

    if devices > machine.size:
        raise ConfigError(
            [f"--devices {devices}: {machine.name} has at most {machine.size} devices"]
        )
    names_model = model in model_names() and not Path(model).is_file()
    keys = {override.partition("=")[0] for override in overrides}
    if names_model and "train.dtype" not in keys:
        overrides = [*overrides, f"train.dtype={fastest_dtype(machine)}"]
    run = read_run_without_data(model, overrides, notes.append)
    if not batch and names_model and "train.global_batch" not in keys:
        batch = default_batch(run, devices)
    if batch:
        run = run.model_copy(update={"train": run.train.model_copy(update={"global_batch": batch})})
    return run
