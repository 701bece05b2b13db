"""The command line, called inside the test's process: what it prints, and its exit code.

A process of its own takes seconds to import torch. That commands start as a user starts them is
tested with some of each; the others are called here.
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
    """As of `subprocess.run`."""

    returncode: int
    stdout: str
    stderr: str


def gridformer_here(*words: str | Path) -> Done:
    """`gridformer WORDS` of one process."""
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
