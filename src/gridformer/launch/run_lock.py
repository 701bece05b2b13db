"""RUNDIR/lock: at most one run at a time writes into a run directory.

The file says who holds it: host, process, since when, and the command. It is created by a hard
link, which exactly one process can do, also over NFS, where `flock` may fail, hang or not lock, and
where process ids mean nothing on another host. Its holder refreshes the time of the file every few
seconds.

A lock whose process has ended on this host is stale at once. One of another host, or of another
container, is stale when it was not refreshed for STALE_S. Times are compared with that of a file
written into the same folder, so that clocks of hosts may differ. Only the process that has created
a file named after a stale lock may remove that lock, so a new one is never taken for it.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from gridformer.launch.processes import process_stat, runs
from gridformer.utils.errors import UserError
from gridformer.utils.files import parse_json, regular_bytes
from gridformer.utils.signals import at_end, end_process
from gridformer.utils.units import MIB

LOCK = "lock"
REFRESH_S = 5.0
STALE_S = 60.0
_POLL_S = 1.0  # between two looks at the lock of another host
_SHORT_S = 0.02
_JOIN_S = 5.0  # for a thread that may write the lock, if the storage is not away


@dataclass(frozen=True)
class Holder:
    """Who holds a lock.

    Attributes:
        host, pid, command: The launcher of a local run, otherwise rank 0.
        since: When it took the lock, in seconds since 1970.
        machine: Differs between hosts and containers, in which `pid` means another process.
        began: When the process began (`process_stat`), because numbers are used again.
        token: A random text.
    """

    host: str
    pid: int
    since: float
    command: str
    machine: str
    began: int
    token: str

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
        return runs(self.pid, self.began)


def this_process() -> Holder:
    """Returns this process as the holder of a lock."""
    command, pid = shlex.join(["gridformer", *sys.argv[1:]]), os.getpid()
    host, began = socket.gethostname(), process_stat(pid)[1]
    return Holder(host, pid, time.time(), command, _machine(), began, secrets.token_hex(8))


def _machine() -> str:
    """Returns a text that differs between hosts, their starts, and containers; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


class RunLock:
    """The lock of one run directory, which `take` takes and the end of the block releases.

        with RunLock() as lock:
            lock.take(run_dir)

    A run of several hosts takes it on rank 0 only.
    """

    def __init__(self) -> None:
        self._path = Path()
        self._mine: Holder | None = None
        self._made: list[Path] = []  # folders that did not exist before
        self._end = threading.Event()
        self._refreshing: threading.Thread | None = None

    @property
    def token(self) -> str:
        """The random text that only the lock of this process has; empty if it holds none."""
        return self._mine.token if self._mine is not None else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def take(self, run_dir: Path, tell: Callable[[str], None] = lambda doing: None) -> None:
        """Takes the lock of a run directory, which is created if it does not exist.

        A lock of another host that is not refreshed is waited for, at most STALE_S.

        Args:
            run_dir: The run directory.
            tell: Receives what this waits for.

        Raises:
            UserError: Another run holds the lock, or nothing can be written there.
        """
        if self._mine is not None:
            return
        self._made = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
        self._path, mine = run_dir / LOCK, this_process()
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            _take(self._path, mine, tell)
        except BaseException as error:
            self._remove_made()
            if not isinstance(error, OSError):
                raise
            raise UserError(
                f"{run_dir} cannot be written ({error.strerror or error}): choose another --out"
            ) from None
        self._mine = mine
        at_end.append(self.release)
        self._end.clear()
        refresh = threading.Thread(target=self._refresh, args=(mine,), name="run lock", daemon=True)
        self._refreshing = refresh
        refresh.start()

    def release(self) -> None:
        """Gives the lock back, and removes folders that were created for it and are empty."""
        mine, self._mine = self._mine, None
        if mine is None:
            return
        self._end.set()
        # It may be about to write a removed lock again.
        if self._refreshing not in (None, threading.current_thread()):
            self._refreshing.join(_JOIN_S)
        with suppress(ValueError):
            at_end.remove(self.release)
        with suppress(OSError):
            if _token_of(self._path) == mine.token:
                self._path.unlink()
        self._remove_made()

    def _remove_made(self) -> None:
        for path in self._made:
            with suppress(OSError):
                path.rmdir()
        self._made = []

    def _refresh(self, mine: Holder) -> None:
        """Refreshes the lock until it is released; ends the process if another run has it."""
        while not self._end.wait(REFRESH_S):
            with suppress(OSError):  # the storage may be away for a moment
                if not self._path.exists():  # somebody removed it
                    _write_new(self._path, mine)
                other = _read(self._path)
                if other is not None and other.token == mine.token:
                    os.utime(self._path)
                elif other is not None and not self._end.is_set():
                    message = (
                        f"gridformer: {self._path} was taken by {other}, because this process did "
                        f"not refresh it for {STALE_S:g} s: it ends, so that no two runs write "
                        "into one folder\n"
                    )
                    os.write(2, message.encode())
                    end_process(1)


def holder_of(run_dir: Path) -> Holder | None:
    """Returns who holds, or held, the lock of a run directory; None if there is none to read."""
    with suppress(OSError, ValueError):
        return _read(run_dir / LOCK)
    return None


def is_held(run_dir: Path) -> bool:
    """Returns whether a run holds the lock of a run directory, as far as one look can tell."""
    holder = holder_of(run_dir)
    with suppress(OSError):
        if holder is not None:
            fresh = time.time() - (run_dir / LOCK).stat().st_mtime < STALE_S
            return holder.runs if holder.is_here else fresh
    return False


def _take(path: Path, mine: Holder, tell: Callable[[str], None]) -> None:
    """Writes the lock as soon as there is none, or only a stale one.

    Raises:
        UserError: Another run holds it.
    """
    seen: tuple[str, float] | None = None  # the token and time of another host's lock
    since = time.monotonic()
    while not _write_new(path, mine):
        holder = holder_of(path.parent)  # over NFS, opening it makes its time below a fresh one
        try:
            found = (holder.token if holder else "", path.stat().st_mtime)
        except FileNotFoundError:
            continue  # it was released
        here = holder if holder is not None and holder.is_here else None
        if here.runs if here else seen not in (None, found):
            raise UserError(
                f"{path.parent} is in use by {holder or 'another run'}: wait until it ends, or "
                "choose another --out"
            )
        seen = found
        # The clock of the other host may be ahead.
        age = max(_now(path.parent) - found[1], time.monotonic() - since)
        if here or age > STALE_S:
            if _take_over(path, found[0], mine):
                return
            time.sleep(_SHORT_S)  # another process takes it over
            continue
        tell(
            f"{path} is held by {holder or 'an unknown process'} and {age:.0f} s old: waiting "
            f"until it is refreshed or {STALE_S:g} s old"
        )
        time.sleep(_POLL_S)


def _write_new(path: Path, holder: Holder) -> bool:
    """Creates the lock, unless there is one; returns whether it did."""
    text = json.dumps(asdict(holder))
    candidate = path.with_name(f".lock-{holder.token}")
    candidate.write_text(text, encoding="utf-8")
    try:
        os.link(candidate, path)
    except FileExistsError:
        # Over NFS, what was done is repeated if the answer was lost, and then finds that.
        return os.path.samefile(candidate, path) if path.exists() else False
    except OSError:  # a file system without hard links
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            return False
    finally:
        candidate.unlink(missing_ok=True)
    return True


def _now(folder: Path) -> float:
    """Returns the time by the clock that sets the times of files in a folder."""
    probe = folder / f".lock-{secrets.token_hex(8)}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _take_over(path: Path, token: str, mine: Holder) -> bool:
    """Replaces a stale lock; returns whether this process has the lock now.

    Of all processes that find the lock stale, the one that creates a file of its name does this.
    """
    claim = path.with_name(f".lock-claim-{sha256(token.encode()).hexdigest()[:16]}")
    try:
        claim.open("x").close()
    except FileExistsError:
        with suppress(OSError):  # of a process that was killed in the lines below
            if _now(path.parent) - claim.stat().st_mtime > STALE_S:
                claim.unlink()
        return False
    try:
        found = _token_of(path)  # else another process was faster
        return found == token and _displace(path, token) and _write_new(path, mine)
    except FileNotFoundError:
        return False
    finally:
        claim.unlink(missing_ok=True)


def _displace(path: Path, token: str) -> bool:
    """Removes a stale lock, and no other that has taken its place; returns whether it did."""
    aside = path.with_name(f".lock-stale-{secrets.token_hex(8)}")
    path.rename(aside)
    try:
        if _token_of(aside) == token:
            return True
        with suppress(OSError):
            os.link(aside, path)
        return False
    finally:
        aside.unlink(missing_ok=True)


def _read(path: Path) -> Holder | None:
    """Returns the holder that a lock file names; None if it is torn.

    Raises:
        OSError: It cannot be read.
    """
    with suppress(ValueError):
        return TypeAdapter(Holder).validate_python(parse_json(regular_bytes(path, MIB)))
    return None


def _token_of(path: Path) -> str:
    """Returns the token in a lock file, or nothing if it is torn; raises OSError."""
    holder = _read(path)
    return holder.token if holder else ""
