"""`gridformer demo`: the whole way, from text to a trained model, in about three minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[Path, typer.Option("--out", help="Run directory.")] = Path("runs/demo"),
) -> None:
    """Prepare real text, train a small GPT-2 on a 2x2 grid of processes, show what came of it.

    Needs no download: the text is the Python standard library's own source. Run again to go on
    from where it was stopped.
    """
    from gridformer.cli.demo_run import run_demo

    run_demo(out)
