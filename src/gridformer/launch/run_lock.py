"""RUNDIR/lock: at most one run at a time writes into a run directory.

The file says who holds it. It is created exclusively, also over NFS, and its holder refreshes its
time every few seconds. A lock whose process has ended on this host is stale at once; one of another
host or container, once it was not refreshed for STALE_S. A process that lost its lock ends.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shlex
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from pydantic import BaseModel

from gridformer.launch.processes import process_stat, runs
from gridformer.utils.errors import UserError
from gridformer.utils.files import regular_bytes
from gridformer.utils.signals import at_end, end_process

LOCK = "lock"
REFRESH_S = 5.0
STALE_S = 60.0
_POLL_S = 1.0  # between two looks at the lock of another host


class Holder(BaseModel, frozen=True):
    """Who holds a lock: the launcher of a local run, otherwise rank 0."""

    host: str
    pid: int
    since: float  # in seconds since 1970
    command: str
    machine: str  # differs between hosts and containers, in which `pid` means another process
    began: int  # when the process began, because ids are used again
    token: str  # a random text

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host} since {since} ({self.command})"

    @property
    def runs(self) -> bool | None:
        """Whether the process still runs; None if it was on another host or in a container."""
        return runs(self.pid, self.began) if self.machine == _machine() else None


def this_process() -> Holder:
    """Returns this process as the holder of a lock."""
    return Holder(
        host=socket.gethostname(),
        pid=os.getpid(),
        since=time.time(),
        command=shlex.join(["gridformer", *sys.argv[1:]]),
        machine=_machine(),
        began=process_stat(os.getpid())[1],
        token=secrets.token_hex(8),
    )


def _machine() -> str:
    """Returns a text that differs between hosts, their starts, and containers."""
    with suppress(OSError):  # not Linux
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


class RunLock(AbstractContextManager["RunLock"]):
    """The lock of one run directory, which `take` takes and the end of the block releases."""

    def __init__(self) -> None:
        self.token = ""  # that of the lock; empty while it is not taken
        self._path = Path()
        self._end = threading.Event()

    def __exit__(self, *error: object) -> None:
        self.release()

    def take(self, run_dir: Path, tell: Callable[[str], None] = lambda doing: None) -> None:
        """Takes the lock of a run directory, at latest STALE_S after another host's last refresh.

        Raises:
            UserError: Another run holds the lock, or nothing can be written there.
        """
        if self.token:
            return
        self._path, mine = run_dir / LOCK, this_process()
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            _take(self._path, mine, tell)
        except OSError as error:
            raise UserError(
                f"{run_dir} cannot be written ({error.strerror or error}): choose another --out"
            ) from None
        self.token = mine.token
        at_end.append(self.release)
        self._end.clear()
        threading.Thread(target=self._refresh, name="run lock", daemon=True).start()

    def release(self) -> None:
        """Gives the lock back."""
        token, self.token = self.token, ""
        if not token:
            return
        self._end.set()
        with suppress(ValueError):
            at_end.remove(self.release)
        with suppress(OSError):
            if getattr(holder_of(self._path.parent), "token", "") == token:
                self._path.unlink()

    def _refresh(self) -> None:
        """Refreshes the lock until it is released; ends the process if another run has it."""
        token = self.token
        while not self._end.wait(REFRESH_S):
            with suppress(OSError):  # the storage may be away for a moment
                other = holder_of(self._path.parent)
                if other is not None and other.token == token:
                    os.utime(self._path)
                elif other is not None and not self._end.is_set():
                    why = f"this process did not refresh it for {STALE_S:g} s"
                    ends = "it ends, so that no two runs write into one folder"
                    text = f"gridformer: {self._path} was taken by {other}, because {why}: {ends}\n"
                    os.write(2, text.encode())
                    end_process(1)


def holder_of(run_dir: Path) -> Holder | None:
    """Returns who holds, or held, the lock of a run directory; None if there is none to read."""
    with suppress(OSError, ValueError):
        return Holder.model_validate_json(regular_bytes(run_dir / LOCK, 2**20))
    return None


def is_held(run_dir: Path) -> bool:
    """Returns whether a run holds the lock of a run directory, as far as one look can tell."""
    holder = holder_of(run_dir)
    with suppress(OSError):
        if holder is not None and holder.runs is None:
            return time.time() - (run_dir / LOCK).stat().st_mtime < STALE_S
    return bool(holder and holder.runs)


def _take(path: Path, mine: Holder, tell: Callable[[str], None]) -> None:
    """Writes the lock as soon as there is none, or only a stale one."""
    seen: tuple[str, float] | None = None  # the token and time of another host's lock
    since = time.monotonic()
    while True:
        with suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
            file.write(mine.model_dump_json())
            return
        holder = holder_of(path.parent)  # over NFS, opening it makes its time below a fresh one
        try:
            present = (holder.token if holder else "", path.stat().st_mtime)
        except FileNotFoundError:
            continue  # it was released
        holder_runs = holder.runs if holder else None
        if holder_runs or (holder_runs is None and seen not in (None, present)):
            raise UserError(
                f"{path.parent} is in use by {holder or 'another run'}: wait until it ends, or "
                "choose another --out"
            )
        seen = present
        with tempfile.NamedTemporaryFile(prefix=".lock-", dir=path.parent) as probe:
            now = os.fstat(probe.fileno()).st_mtime  # by the clock of the storage
        # The clock of the other host may be ahead. A lock that is torn was not written to its end.
        age = max(now - present[1], time.monotonic() - since)
        if holder_runs is None and age <= (STALE_S if holder else REFRESH_S):
            held = f"{path} is held by {holder or 'an unknown process'} and {age:.0f} s old"
            tell(f"{held}: waiting until it is refreshed or {STALE_S:g} s old")
            time.sleep(_POLL_S)
        elif _take_over(path, present[0], mine):
            return


def _take_over(path: Path, token: str, mine: Holder) -> bool:
    """Replaces the stale lock with that token; returns whether this process has the lock now.

    Of processes that try it at once, `flock` on the stale file lets one through. Where storage does
    not lock between hosts, two of them may replace it: the first ends at its next refresh.
    """
    with suppress(FileNotFoundError), path.open("r+b") as stale:
        with suppress(OSError):
            fcntl.flock(stale, fcntl.LOCK_EX)
        if getattr(holder_of(path.parent), "token", "") == token:
            written = path.with_name(f".lock-{mine.token}")
            written.write_text(mine.model_dump_json(), encoding="utf-8")
            written.replace(path)
            return True
    return False
