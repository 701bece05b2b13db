"""`gridformer demo`: everything from text to a trained model, in one to two minutes."""

from __future__ import annotations

from pathlib import Path


def demo(
    out: Path = Path("runs/demo"),
) -> None:
    """Prepare real text, train a small GPT-2 on a 2x2 grid of processes, and show the result.

    The demo needs no download, because its text is the source code of the Python standard library.
    If it is stopped, run it again to resume.

    Args:
        out: The run directory.
    """
    from gridformer.cli.demo_run import run_demo

    run_demo(out)
