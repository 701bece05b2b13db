"""What a launcher sees of its machine: states of processes, the end of their fork server, signals.

Workers are forked from a server (`gridformer.utils.forkserver`), which also tells the launcher when
one has ended. If the server is killed, every worker seems to have ended with code 255, although all
of them still run. This module finds that out, and ends them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType
from typing import Any

from gridformer.utils.signals import StopPolicy

UNKNOWN = 255  # the exit code that multiprocessing makes up for what it does not know
_NOTICED_S = 1.0  # the server's pipes close a moment before the system says that it has ended


def process_state(pid: int) -> str:
    """Returns the state of a process of this machine: a letter of proc(5), or "" if it is gone.

    It is "?" where the system does not say.
    """
    if not Path("/proc/self/stat").exists():
        return "?"
    return process_stat(pid)[0]


def process_stat(pid: int) -> tuple[str, int]:
    """Returns the state of a process, and when it began; nothing and 0 if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, ValueError, IndexError):
        return "", 0


def runs(pid: int, began: int) -> bool:
    """Returns whether a process that began then still runs; the number may be used again."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    state, now = process_stat(pid)
    return state not in ("Z", "X") and now == began


class ForkServer:
    """The fork server of this process, once it runs."""

    def __init__(self) -> None:
        self.pid: int | None = None
        # multiprocessing offers no name for the process id of its server.
        self._server: Any = forkserver._forkserver

    def note(self) -> None:
        """Remembers the server that runs now; multiprocessing replaces one that has ended."""
        self.pid = self._server._forkserver_pid

    def ended(self) -> str:
        """Returns how the server has ended, or an empty text if it runs."""
        now = self._server._forkserver_pid
        if self.pid is None:
            return ""
        who = f"the fork server (pid {self.pid}), from which all ranks were started,"
        if now != self.pid:
            return f"{who} has ended"
        until = time.monotonic() + _NOTICED_S
        while True:
            try:
                found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return f"{who} has ended"
            if found is not None:
                break
            if time.monotonic() > until:
                return ""
            time.sleep(0.01)
        if found.si_code == os.CLD_EXITED:
            return f"{who} has ended with code {found.si_status}"
        return f"{who} was killed by {signal_text(found.si_status)}"


def end_orphans(pids: Iterable[int], patience_s: float, is_saving: Callable[[], bool]) -> list[int]:
    """Ends processes that are nobody's children anymore.

    They are asked to stop, so that they can save, and those that still run later are killed.

    Args:
        pids: Their ids.
        patience_s: Seconds between the two.
        is_saving: Whether a process saves; it is given the time that it takes.

    Returns:
        The ids of those that had to be killed.
    """
    began = {pid: process_stat(pid)[1] for pid in pids}

    def left() -> list[int]:
        return [pid for pid in began if runs(pid, began[pid])]

    def send(signum: int) -> list[int]:
        for pid in (sent := left()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        return sent

    send(signal.SIGTERM)
    until = time.monotonic() + patience_s
    while left() and (time.monotonic() < until or is_saving()):
        time.sleep(0.1)
    killed, until = send(signal.SIGKILL), time.monotonic() + _NOTICED_S
    while left() and time.monotonic() < until:
        time.sleep(0.01)
    return killed


def signal_text(signum: int) -> str:
    """Returns a signal in words, such as `signal 9 (SIGKILL)`."""
    try:
        return f"signal {signum} ({signal.Signals(signum).name})"
    except ValueError:
        return f"signal {signum} (a real-time signal)"


@dataclass
class Signals:
    """The first stop signal that the launcher received; `reader` is readable once one arrived.

    `again` says whether that was Ctrl-C, and a second Ctrl-C came.
    """

    reader: int
    writer: int
    first: int | None = None
    again: bool = False

    def clear(self) -> None:
        """Empties `reader`, so that only the next signal makes it readable."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.reader, 64)

    def note(self, signum: int, frame: FrameType | None) -> None:
        """Handler for Python's `signal` module."""
        self.again = self.again or self.first == signum == signal.SIGINT
        self.first = self.first or signum
        with contextlib.suppress(BlockingIOError):
            os.write(self.writer, b"\0")


@contextlib.contextmanager
def signals_seen(policy: StopPolicy) -> Iterator[Signals]:
    """Catches stop signals inside the block. A SIGHUP that nohup ignores stays ignored."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signals = Signals(reader, writer)
    before: dict[int, Any] = {}
    try:
        for caught in policy.signals:
            if signal.getsignal(caught) is not signal.SIG_IGN:
                before[caught] = signal.signal(caught, signals.note)
        yield signals
    finally:
        for signum, handler in before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        os.close(reader)
        os.close(writer)
