"""`gridformer layouts` and `plan`: the layouts of a model that work, and the fastest of them."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gridformer.cli.shared import AsJson, Overrides, Routing, in_dtype, state_routing
from gridformer.utils.errors import ConfigError, UserError, require
from gridformer.utils.files import check_output
from gridformer.utils.process import last_work, processor_s
from gridformer.utils.units import ESTIMATED_TOKENS, MOST_PROCESSES, byte_unit, counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from gridformer.cluster.file import Cluster
    from gridformer.config import RunConfig
    from gridformer.memory.layouts import Listed

_LIST_S = 12  # of a processor; only many thousands of processes have that many layouts
_SOON_S, _LATE_S = 80.0, 120.0  # processor time of a plan, up to 64 devices and above


def layouts(
    model: Annotated[str, typer.Argument(metavar="MODEL|RUN")],
    devices: Annotated[int, typer.Option(min=1, max=MOST_PROCESSES)],
    overrides: Overrides = None,
    scheme: list[str] | None = None,
    settings: bool = False,
) -> None:
    """List all layouts of a model on a number of devices, and estimate the memory of each.

    For layouts that do not work, print the reasons. Without train.global_batch a step has the
    fewest samples that every layout can split, and without data.seq_len these are as long as the
    model takes, but at most 8192 tokens. A shipped model without a run file is in bfloat16.

    Try: gridformer layouts bert-large --devices 8 train.global_batch=64

    Args:
        model: The name of a shipped model, or a run file.
        devices: The number of devices, one per process.
        scheme: List only this scheme, such as megatron or optimus. Can be repeated.
        settings: Print each layout as settings to copy into a `train` command.
    """
    from rich.console import Console

    from gridformer.config import any_of, find_run_file, load_run, model_names, parse_run, schemes
    from gridformer.memory.layouts import candidates, common_batch, list_layouts

    only = scheme or ()
    wrong = [name for name in only if name not in schemes()]
    if wrong:
        raise UserError(f"--scheme {wrong[0]} is unknown: use {any_of(schemes())}")
    given = in_dtype(model, overrides, "bfloat16")
    if mine := [one for one in given if one.startswith("layout.")]:
        raise UserError(f"argument {mine[0]}: layouts are what this lists: use --scheme")
    if model in model_names() and not Path(model).is_file():
        run = parse_run({"model": model, "data": {"path": "."}}, given)
    else:
        run = load_run(find_run_file(model, or_model=True), given)
    batch, why = run.train.global_batch, "train.global_batch"
    if "global_batch" not in run.train.model_fields_set:
        batch, why = common_batch(devices, only), "the fewest that all layouts split"
    length = run.data.seq_len or min(run.model.max_seq_len, ESTIMATED_TOKENS)
    run = run.model_copy(update={"data": run.data.model_copy(update={"seq_len": length})})
    listed = list_layouts(run, devices, batch, only, _LIST_S)
    total = sum(1 for _ in candidates(devices, only))
    if len(listed) < total:
        n = f"{len(listed):,} of {total:,} layouts were checked in {_LIST_S} s"
        typer.echo(f"{n}, fewest stages first (see --scheme)", err=True)
    if settings:
        for one in listed:
            if not one.problems:
                typer.echo(one.settings_over(run.layout) or f"layout.scheme={run.layout.scheme}")
        return
    what = f"{run.model.name} on {counted(devices, 'device')}, {counted(batch, 'sample')} of "
    what += f"{length} tokens a step ({why}), {run.train.dtype}"
    if run.train.recompute != "none":
        what += f", train.recompute={run.train.recompute}"
    _print_layouts(what, listed, Console(highlight=False))


def _print_layouts(what: str, listed: Sequence[Listed], console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    from gridformer.memory.layouts import reasons

    fitting = [one for one in listed if not one.problems]
    n = len(fitting)
    console.print(Text(f"{what}: {counted(n, 'layout')} work{'s' * (n == 1)}"))
    if fitting:
        unit, unit_name = byte_unit(max(one.modes["replicate"] for one in fitting))
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
        table.add_column("layout")
        held = {mode for one in fitting for mode in one.modes}
        modes = [mode for mode in ("replicate", "zero1", "fsdp") if mode in held]
        for mode in modes:
            table.add_column(unit_name if mode == "replicate" else mode, justify="right")
        for one in fitting:
            sizes = [f"{one.modes[m] / unit:,.1f}" if m in one.modes else "-" for m in modes]
            table.add_row(Text(one.name), *sizes)
        console.print(table)
        note = f"{unit_name}: a quick estimate of what the fullest rank holds in such a step"
        if len(modes) > 1:
            note += "; the next columns are the same with layout.dp_mode=zero1 and fsdp"
        note += ". `gridformer memory` traces a layout; --settings prints settings to copy."
        console.print(Text(note))
    for number, reason in enumerate(reasons(listed)):
        if not number:
            count = str(len(listed) - len(fitting))
            do = "does" if count == "1" else "do"
            console.print(Text(f"\n{count} {do} not work, counted by their first reason:"))
        where = f"{reason.where}: " if reason.where else ""
        console.print(Text(f"{reason.n_layouts:{len(count)}}  {where}{reason.why}"))


@last_work()
def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL|RUN")],
    devices: Annotated[int, typer.Option(min=1)],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE")] = None,
    cluster: Annotated[str, typer.Option(metavar="NAME|FILE")] = "",
    batch: Annotated[int, typer.Option(min=0)] = 0,
    top: Annotated[int, typer.Option(min=1)] = 10,
    also: Annotated[list[str] | None, typer.Option(metavar="'KEY=VALUE ...'")] = None,
    emit: Path | None = None,
    html: Path | None = None,
    seconds: Annotated[float, typer.Option(min=0)] = 0.0,
    as_json: AsJson = False,
    routing: Routing = None,
) -> None:
    """Find the fastest layouts of a model on a cluster, and say what limits each.

    Every arrangement of the devices is estimated by a roofline. The best of each kind are
    traced: the real code runs on tensors without memory, and its kernels and messages
    are timed by the cluster file. Only layouts that were traced and fit are ranked.
    Nothing is applied: --emit writes a run file to train with.

    [bold]Examples:[/bold]

    gridformer plan gpt2-1.5b --cluster dgx-h100 --devices 8

    gridformer plan mine.yaml --cluster selene-a100 --devices 64 --batch 512 --emit best.yaml

    Args:
        model: The name of a shipped model, or a run file.
        cluster: The name of a shipped cluster, or a file that `gridformer calibrate` writes.
        devices: The number of devices, one per process.
        overrides: Values that replace those of the run file.
        batch: The number of sequences in a step over all devices. The default is that of the run
            file. For a model it is about half a million tokens, and at least one sequence for each
            device.
        top: List this number of layouts.
        also: Trace and list this layout, too, wherever it stands: what it sets in the run file,
            such as --also "layout.dp=8 layout.dp_mode=fsdp". May be repeated.
        emit: Write the best layout as a run file.
        html: Write a report as a page.
        seconds: Begin no trace after this number of seconds of the processor's time, all cores
            together, if a layout was found. By default 80, or 120 for more than 64 devices.
    """
    began = processor_s()  # loading torch is a part of the time

    from rich.console import Console

    from gridformer.cluster.file import cluster_path, load_cluster
    from gridformer.plan.advice import advise, remedies
    from gridformer.plan.search import Search
    from gridformer.plan.show import print_result, ranking_as_json, reasons, write_run
    from gridformer.plan.trace_candidates import Tracing

    inputs = [model, cluster_path(cluster) or cluster]
    if html is not None:
        require("plotly", "--html", "html")
        check_output("--html", html, inputs)
    if emit is not None:
        check_output("--emit", emit, inputs)
    machine = load_cluster(cluster)
    notes: list[str] = []
    run = _run(model, overrides or [], machine, devices, batch, notes)
    state_routing(routing)
    given = [_also(model, overrides or [], run, devices, text) for text in also or []]
    console = Console(highlight=False, stderr=as_json)
    with console.status("estimating layouts") as status:
        all_s = seconds or (_SOON_S if devices <= 64 else _LATE_S)
        if not console.is_terminal:
            typer.echo(f"estimating layouts, about {all_s:g} s of the processor", err=True)
        asked = Search(run, machine, devices, named=cluster)
        tracing = Tracing(asked, top, tell=status.update)
        tracing.run(all_s - (tracing.began - began), given)
        result = tracing.result
        for prediction in filter(None, (one.prediction for one in result.listed)):
            prediction.warnings[:0] = notes
        advice = [advise(asked, one, tracing.traced) for one in result.listed]
        would_fit = [] if result.layouts else remedies(asked, result.smallest)
        would_fit += [f"{note}." for note in notes if not result.layouts]
        if html is not None:
            from gridformer.plan.html import write_plan_page

            status.update("estimating other batches and numbers of devices")
            write_plan_page(run, machine, devices, result, advice, html, would_fit)
        if result.layouts and emit is not None:
            # Before the output, whose reader may stop reading.
            write_run(result.layouts[0], emit, shlex.join(["gridformer", *sys.argv[1:]]))
    if as_json:
        typer.echo(json.dumps(ranking_as_json(result, advice, would_fit)))
    elif result.layouts:
        print_result(run, result, advice, machine, console)
    else:
        console.print(f"Nothing fits on {counted(devices, 'device')} of {machine.name}.")
        for one, why in zip(result.listed, advice):
            console.print(f"- {one.name}: {' '.join(reasons(result, one, why))}")
        for sentence in would_fit:
            console.print(f"- {sentence}", soft_wrap=True)
    if html is not None and not as_json:
        console.print(f"The report: {html}")
    if not result.layouts:
        raise typer.Exit(1)
    if emit is not None and not as_json:
        console.print(f"The best layout as a run file: {emit}")


def _run(
    model: str, overrides: list[str], machine: Cluster, devices: int, batch: int, notes: list[str]
) -> RunConfig:
    """Returns the run to plan: of a run file with its settings, or of a model with defaults."""
    from gridformer.config import model_names
    from gridformer.launch.plan import read_run_without_data
    from gridformer.plan.search import default_batch

    if devices > machine.size:
        most = counted(machine.size, "device")
        raise UserError(f"--devices {devices}: {machine.name} has at most {most}")
    names_model = model in model_names() and not Path(model).is_file()
    keys = {override.partition("=")[0] for override in overrides}
    overrides = in_dtype(model, overrides, machine.fastest_dtype)
    run = read_run_without_data(model, overrides, notes.append)
    if not batch and names_model and "train.global_batch" not in keys:
        batch = default_batch(run, devices)
    if batch:
        run = run.model_copy(update={"train": run.train.model_copy(update={"global_batch": batch})})
    return run


def _also(model: str, overrides: list[str], run: RunConfig, devices: int, text: str) -> RunConfig:
    """Returns the run with a layout that the user has asked for, checked as `train` checks it."""
    from gridformer.launch.plan import read_run_without_data

    batch, dtype = run.train.global_batch, run.train.dtype
    given = [*overrides, f"train.dtype={dtype}", f"train.global_batch={batch}"]
    try:
        other = read_run_without_data(model, [*given, *shlex.split(text)], lambda note: None)
        if (n := other.layout.n_processes) != devices:
            raise ConfigError(f"its layout has {counted(n, 'device')}, not --devices {devices}")
        if (other.model, other.data, other.train.global_batch) != (run.model, run.data, batch):
            raise ConfigError("it changes the model, the data or the batch: set keys of layout")
    except (ConfigError, ValueError) as error:
        problems = [f"--also {text!r}: {one}" for one in getattr(error, "problems", [error])]
        raise ConfigError(*problems) from None
    return other
