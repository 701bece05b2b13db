"""`gridformer layouts`: lists the layouts of a model that work, and why the others do not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gridformer.utils.units import MOST_PROCESSES, MOST_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from gridformer.memory.layouts import Listed


_SECONDS = 12  # of a processor; only many thousands of processes have that many layouts


def layouts(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="The name of a shipped model, or a run file.")
    ],
    processes: Annotated[
        int,
        typer.Option(
            "--processes",
            "-p",
            min=1,
            max=MOST_PROCESSES,
            help="The number of processes, one per device.",
        ),
    ],
    global_batch: Annotated[
        int,
        typer.Option(
            "--global-batch",
            min=0,
            max=MOST_TOKENS,
            help="The number of samples in a step; 0 means train.global_batch of the run file, or "
            "else the smallest that every layout can split.",
        ),
    ] = 0,
    seq_len: Annotated[
        int,
        typer.Option(
            "--seq-len",
            min=0,
            max=MOST_TOKENS,
            help="The number of tokens in a sample; 0 means data.seq_len of the run file, or else "
            "the longest of the model, but at most 8192.",
        ),
    ] = 0,
    scheme: Annotated[
        list[str] | None,
        typer.Option(
            "--scheme", help="List only this scheme, such as megatron or optimus. Can be repeated."
        ),
    ] = None,
    settings: Annotated[
        bool,
        typer.Option(
            "--settings", help="Print each layout as settings to copy into a `train` command."
        ),
    ] = False,
) -> None:
    """List all layouts of a model on a number of processes, and estimate the memory of each.

    For layouts that do not work, print the reasons.

    Try: gridformer layouts bert-large --processes 8
    """
    from rich.console import Console

    from gridformer.config import SCHEMES, any_of, find_run_file, load_run, model_names, parse_run
    from gridformer.memory.layouts import candidates, common_batch, list_layouts
    from gridformer.utils.errors import ConfigError
    from gridformer.utils.units import ESTIMATED_TOKENS

    wrong = [name for name in scheme or () if name not in SCHEMES]
    if wrong:
        raise ConfigError([f"--scheme {wrong[0]} is unknown: use {any_of(SCHEMES)}"])
    if model in model_names() and not Path(model).is_file():
        run = parse_run({"model": model, "data": {"path": "."}})
    else:
        run = load_run(find_run_file(model, or_model=True))
    section: dict[str, Any] = run.model.model_dump()
    schemes: Any = scheme or ()
    why = "--global-batch"
    if not global_batch and "global_batch" in run.train.model_fields_set:
        global_batch, why = run.train.global_batch, "train.global_batch"
    elif not global_batch:
        global_batch, why = common_batch(processes, schemes), "the fewest that all layouts split"
    seq_len = seq_len or run.data.seq_len or min(run.model.max_seq_len, ESTIMATED_TOKENS)
    found = list_layouts(section, processes, global_batch, seq_len, schemes, _SECONDS)
    total = sum(1 for _ in candidates(processes, schemes))
    if len(found) < total:
        left_out = (
            f"{len(found):,} of {total:,} layouts were checked in {_SECONDS} s, "
            "fewest stages first (see --scheme)"
        )
        typer.echo(left_out, err=True)
    if settings:
        for one in found:
            if not one.problems:
                typer.echo(one.settings_over(run.layout) or f"layout.scheme={run.layout.scheme}")
        return
    what = f"{run.model.name} on {processes} process{'es' * (processes > 1)}, "
    what += f"{global_batch} samples of {seq_len} tokens a step ({why})"
    _print(what, found, Console(highlight=False))


def _print(what: str, found: Sequence[Listed], console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    from gridformer.memory.layouts import reasons
    from gridformer.utils.units import byte_unit

    fitting = [one for one in found if not one.problems]
    console.print(Text(f"{what}: {len(fitting)} layouts work"))
    if fitting:
        unit, unit_name = byte_unit(max(one.modes["replicate"] for one in fitting))
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
        table.add_column("layout")
        modes = [
            mode
            for mode in ("replicate", "zero1", "fsdp")
            if any(mode in one.modes for one in fitting)
        ]
        for mode in modes:
            table.add_column(unit_name if mode == "replicate" else mode, justify="right")
        for one in fitting:
            held = [f"{one.modes[m] / unit:,.1f}" if m in one.modes else "-" for m in modes]
            table.add_row(Text(one.name), *held)
        console.print(table)
        note = (
            f"{unit_name}: an estimate of what the fullest rank holds in such a step, in "
            "float32 and without recomputation"
        )
        if len(modes) > 1:
            note += "; the next columns are the same with layout.dp_mode=zero1 and fsdp"
        note += ". `gridformer memory` shows it exactly; --settings prints settings to copy."
        console.print(Text(note))
    for number, reason in enumerate(reasons(found)):
        if not number:
            count = str(len(found) - len(fitting))
            console.print(Text(f"\n{count} do not work, counted by their first reason:"))
        where = f"{reason.where}: " if reason.where else ""
        console.print(Text(f"{reason.n_layouts:{len(count)}}  {where}{reason.why}"))
