"""What a launcher sees of its machine: processes, the fork server of its workers, signals."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver, util
from pathlib import Path
from types import FrameType
from typing import Any

from gridformer.utils import signals
from gridformer.utils.files import private_prefix
from gridformer.utils.process import let_threads_sleep

_NOTICED_S = 1.0  # pipes of a process close a moment before the system says that it has ended
_LONGEST_SOCKET = 103  # characters of its path on macOS, and four more on Linux
# Modules that every worker that trains would otherwise import by itself.
PRELOAD = [
    "torch",
    "torch.distributed",
    "safetensors",
    "gridformer.cli.app",  # imported by __main__
]
_server_owner = 0  # the process that has started the fork server


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


def warm_up(*modules: str) -> None:
    """Starts to load torch and `modules` in the fork server, from which workers are forked.

    Calling this is optional. An early call lets more of the loading overlap with the caller's own
    imports. It must be in the main thread.
    """
    global _server_owner
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *modules, "gridformer.launch.interruptible"])
    _name_temporary_folder()
    let_threads_sleep()  # the server, which loads torch, inherits the setting
    if _server_owner != os.getpid():
        _server_owner = os.getpid()
        atexit.register(_end_server)
        signals.at_end.append(_end_server)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server inherits that, too
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


def _end_server() -> None:
    """Ends the server with its owner. By itself it would end only once it has loaded everything."""
    pid = fork_server()
    if pid is not None and os.getpid() == _server_owner:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def _name_temporary_folder() -> None:
    """Gives the folder with the server's socket a name that says whose it is.

    multiprocessing would name it `pymp-...`, and if this process is killed nobody could tell that
    it may be removed, as `remove_private_leftovers` does.
    """
    # multiprocessing offers no name for this setting, which `util.get_temp_dir` reads.
    settings: dict[str, Any] = getattr(multiprocessing.current_process(), "_config", {})
    if settings.get("tempdir") is not None:
        return
    where, prefix = tempfile.gettempdir(), private_prefix()
    if len(os.fsencode(f"{where}/{prefix}12345678/listener-12345678")) > _LONGEST_SOCKET:
        where = "/tmp"
    folder = settings["tempdir"] = tempfile.mkdtemp(prefix=prefix, dir=where)
    # Late, as multiprocessing removes its own.
    util.Finalize(None, shutil.rmtree, (folder, True), exitpriority=-100)


def fork_server() -> int | None:
    """Returns the id of multiprocessing's fork server, from which workers are forked, if it runs.

    multiprocessing replaces a dead server when it starts the next worker.
    """
    server: Any = forkserver._forkserver
    pid: int | None = server._forkserver_pid
    return pid


def how_it_ended(pid: int) -> str:
    """Returns how a child of this process has ended, as a verb; an empty text if it runs."""
    until = time.monotonic() + _NOTICED_S
    while time.monotonic() < until:
        try:
            status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return "has ended"
        if status is not None:
            by_signal = status.si_code != os.CLD_EXITED
            code = status.si_status
            return f"was killed by {signal_text(code)}" if by_signal else f"ended with code {code}"
        time.sleep(0.01)
    return ""


def end_orphans(pids: Iterable[int], patience_s: float, is_saving: Callable[[], bool]) -> int:
    """Ends processes that are nobody's children anymore; returns how many had to be killed.

    They are killed if they still run `patience_s` after SIGTERM, unless one of them saves.
    """
    began = {pid: process_stat(pid)[1] for pid in pids}
    for signum, seconds in ((signal.SIGTERM, patience_s), (signal.SIGKILL, _NOTICED_S)):
        sent = left = [pid for pid in began if runs(pid, began[pid])]
        for pid in sent:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)
        until = time.monotonic() + seconds
        while left and (time.monotonic() < until or (signum == signal.SIGTERM and is_saving())):
            time.sleep(0.02)
            left = [pid for pid in left if runs(pid, began[pid])]
    return len(sent)


def signal_text(signum: int) -> str:
    """Returns a signal in words, such as `signal 9 (SIGKILL)`."""
    try:
        return f"signal {signum} ({signal.Signals(signum).name})"
    except ValueError:
        return f"signal {signum} (a real-time signal)"


@dataclass
class Signals:
    """The first stop signal that the launcher received, and whether a second Ctrl-C came."""

    first: int | None = None
    again: bool = False

    def note(self, signum: int, frame: FrameType | None) -> None:
        """Handler for Python's `signal` module."""
        self.again = self.again or self.first == signum == signal.SIGINT
        self.first = self.first or signum


@contextmanager
def signals_seen(policy: signals.StopPolicy) -> Iterator[Signals]:
    """Catches stop signals inside the block. A SIGHUP that nohup ignores stays ignored."""
    seen = Signals()
    with handled(policy.signals, seen.note):
        yield seen


@contextmanager
def handled(
    signums: Iterable[int], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Handles signals inside the block, except for ignored signals."""
    before: dict[int, Any] = {
        signum: signal.signal(signum, handler)
        for signum in signums
        if signal.getsignal(signum) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for signum, former in before.items():
            signal.signal(signum, signal.SIG_DFL if former is None else former)
