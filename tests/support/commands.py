"""Calls the command line inside the test's process, and returns its output and exit code.

A separate process would take seconds to import torch. A few tests start each kind of command as a
user does; the others call it here.
"""

import contextlib
import io
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import typer
import yaml

from gridformer.cli import app, shared

Done = subprocess.CompletedProcess[str]


@cache
def built() -> typer.core.TyperGroup:
    """Return the command line, which typer would build anew for each command in 80 ms."""
    group = typer.main.get_command(app.app)
    assert isinstance(group, typer.core.TyperGroup)
    return group


def gridformer_here(*words: str | Path) -> Done:
    """Run `gridformer WORDS` in this process."""
    with patch.object(app, "app", built()), patch.object(shared, "end_process", sys.exit):
        return called_here(app.main, "gridformer", *words)


def called_here(function: Callable[[], None], *argv: str | Path) -> Done:
    """Call a program's main function in this process, with its name and words."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        patch.object(sys, "argv", [*map(str, argv)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            function()
        except SystemExit as exit_:
            code = int(exit_.code or 0)
    return Done(argv, code, out.getvalue(), err.getvalue())


def python_alone(*words: str | Path, **options: Any) -> Done:
    """Run `python WORDS` in a process of its own."""
    command = [sys.executable, *map(str, words)]
    options = {"timeout": 240, **options}
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def gridformer_alone(*words: str | Path, **options: Any) -> Done:
    """Run `gridformer WORDS` in a process of its own, as a user does."""
    return python_alone("-m", "gridformer", *words, **options)


def write_run(path: Path, data: Path | str, n_layers: int = 1, **sections: dict[str, Any]) -> Path:
    """Write the run file of a tiny GPT-2."""
    model = {"n_layers": n_layers, "hidden_size": 16, "n_heads": 2, "max_seq_len": 16}
    path.write_text(yaml.safe_dump({"model": model, "data": {"path": str(data)}, **sections}))
    return path
