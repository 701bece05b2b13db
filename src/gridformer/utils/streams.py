"""Standard streams whose errors do not end a command."""

from __future__ import annotations

import io
import os
import sys


def never_fail_to_print() -> None:
    """Keeps a command from failing in the middle because something cannot be printed.

    It prints `?` for what the terminal's encoding lacks, and nothing where a stream was closed
    before the command began, as service managers may do.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def leave_progress_bar() -> None:
    """Begins a new line of the terminal and shows its cursor, as a process does that ends itself.

    Where one was killed, what it had written of its progress bar is cleared. An empty line stays
    as it is.
    """
    if sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        print("\r\x1b[2K\x1b[?25h", end="", flush=True)
