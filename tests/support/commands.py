"""Calls the command line inside the test's process, and returns its output and exit code.

A separate process would take seconds to import torch. A few tests start each kind of command as a
user does; the others call it here.
"""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from gridformer.cli.app import main


@dataclass(frozen=True)
class Done:
    """The result of a command, with the attributes of `subprocess.run`'s result."""

    returncode: int
    stdout: str
    stderr: str


def gridformer_here(*words: str | Path) -> Done:
    """Run `gridformer WORDS` in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        patch.object(sys, "argv", ["gridformer", *map(str, words)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as exit_:
            code = int(exit_.code or 0)
    return Done(code, out.getvalue(), err.getvalue())
