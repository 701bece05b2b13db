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
