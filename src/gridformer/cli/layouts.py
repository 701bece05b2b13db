"""`gridformer layouts`: every way to spread a model over processes, and why some are none."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gridformer.listing import Listed


def layouts(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A shipped model's name, or a run file.")
    ],
    processes: Annotated[
        int, typer.Option("--processes", "-p", min=1, help="Devices to spread it over.")
    ],
    global_batch: Annotated[
        int, typer.Option("--global-batch", min=0, help="Samples a step; 0: what fits a layout.")
    ] = 0,
    seq_len: Annotated[
        int, typer.Option("--seq-len", min=0, help="Tokens a sample; 0: the model's longest.")
    ] = 0,
    scheme: Annotated[
        list[str] | None,
        typer.Option("--scheme", help="single, megatron, optimus, ...; repeatable."),
    ] = None,
) -> None:
    """List all layouts of a model on a number of processes; of those that do not work, say why.

    Try: gridformer layouts bert-large --processes 8
    """
    from rich.console import Console
    from rich.text import Text

    from gridformer.config import SCHEMES, load_run, parse_run
    from gridformer.errors import ConfigError
    from gridformer.listing import by_reason, list_layouts
    from gridformer.parallel.registry import describe

    wrong = [name for name in scheme or () if name not in SCHEMES]
    if wrong:
        raise ConfigError([f"--scheme {wrong[0]}: use {', '.join(SCHEMES)}"])
    if Path(model).suffix in (".yaml", ".yml"):
        run = load_run(model)
    else:
        run = parse_run({"model": model, "data": {"path": "."}})
    section: dict[str, Any] = run.model.model_dump()
    found = list_layouts(section, processes, global_batch, seq_len, scheme or ())  # type: ignore[arg-type]
    fitting = [one for one in found if not one.problems]

    console = Console(highlight=False)
    console.print(f"{run.model.name} on {processes} processes: {len(fitting)} layouts work")
    if fitting:
        width = max(len(describe(one.layout)) for one in fitting)
        lines = ["layout".ljust(width) + "  global_batch  dp_mode   settings"]
        for one in fitting:
            modes = ",".join(one.modes) if len(one.modes) > 1 else "-"
            cells = (describe(one.layout).ljust(width), f"x {one.global_batch:<10}", modes)
            lines.append("  ".join((*cells, one.settings or "(none)")))
        # Unwrapped, to be searched and copied.
        console.print(Text("\n".join(lines)), soft_wrap=True)
    for reason, those in by_reason(found).items():
        console.print(Text(f"\nNot {_names(those)}:\n  {reason}"), soft_wrap=True)


def _names(those: Sequence[Listed]) -> str:
    """The first few, and how many more."""
    from gridformer.parallel.registry import describe

    names = [describe(one.layout) for one in those]
    more = f"; and {len(names) - 4} more" if len(names) > 5 else ""
    return "; ".join(names[:4] if more else names) + more
