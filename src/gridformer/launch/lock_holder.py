"""Who holds the lock of a run directory, and whether that process still runs."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Holder:
    """Who holds a lock.

    Attributes:
        host: The name of the host.
        pid: The process on it, which is the launcher of a local run and otherwise rank 0.
        since: When it took the lock, in seconds since 1970.
        command: Its command line.
        machine: A text that differs between hosts and containers, in which the same `pid` means
            another process.
        began: When the process began, in ticks since the machine was started, because the number
            of a process is used again; 0 where this is not known.
        token: A random text.
    """

    host: str
    pid: int
    since: float
    command: str
    machine: str = ""
    began: int = 0
    token: str = ""

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host} since {since} ({self.command})"

    @property
    def is_here(self) -> bool:
        """Whether this process sees the holder's process if it still runs."""
        return (self.host, self.machine) == (socket.gethostname(), _machine())

    @property
    def runs(self) -> bool:
        """Whether the holder's process still runs; only for a holder that `is_here`."""
        if not Path("/proc/self/stat").exists():
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return False
            except PermissionError:
                return True
            return True
        state, began = _process(self.pid)
        return state not in ("", "Z", "X") and began == self.began


def this_process() -> Holder:
    """Returns this process as the holder of a lock."""
    pid = os.getpid()
    words = ["gridformer", *sys.argv[1:]]
    return Holder(
        host=socket.gethostname(),
        pid=pid,
        since=time.time(),
        command=shlex.join(words),
        machine=_machine(),
        began=_process(pid)[1],
    )


def _machine() -> str:
    """Returns a text that differs between hosts, their starts, and containers; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _process(pid: int) -> tuple[str, int]:
    """Returns the state of a process, and when it began; nothing and 0 if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, ValueError, IndexError):
        return "", 0
