"""The machine, the versions, the commit and the command, which are printed above every table."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from datetime import datetime
from pathlib import Path

from gridformer.utils.process import n_cores, running

BUSY = running()  # when the benchmark began, whose own processes do not count


def describe_machine(module: str) -> dict[str, str]:
    """Return what the numbers depend on besides the code; it is written beside them.

    If other programs have been using the processor, that is also told on standard error.
    """
    import torch

    busy = f". When it began, {BUSY}" if BUSY else ""
    if busy:
        print(f"this machine is busy, so times will be off{busy}", file=sys.stderr)
    return {
        "date": datetime.now().strftime("%Y-%m-%d"),
        "cpu": _cpu_model(),
        "cores": str(n_cores()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "backend": "gloo",
        "commit": _commit(),
        "command": command_line(module),
        "busy": busy,
    }


def command_line(module: str) -> str:
    """Return the command line as a user would type it in the repository's root."""
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    """Return the commit, with `+` if files differ from it; empty outside a checkout."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.strip()
