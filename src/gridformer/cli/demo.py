"""`gridformer demo`: everything from text to a trained model, in one to two minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[Path, typer.Option("--out", help="The run directory.")] = Path("runs/demo"),
) -> None:
    """Prepare real text, train a small GPT-2 on a 2x2 grid of processes, and show the result.

    The demo needs no download, because its text is the source code of the Python standard library.
    If it is stopped, run it again to resume.
    """
    from gridformer.cli.demo_run import run_demo

    run_demo(out)
