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

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Self

from gridformer.launch.lock_holder import Holder, this_process
from gridformer.utils.errors import UserError
from gridformer.utils.files import UnreadableError, parse_json, read_json, regular_bytes
from gridformer.utils.signals import at_end, end_process
from gridformer.utils.units import MIB

LOCK = "lock"
REFRESH_S = 5.0
STALE_S = 60.0
_POLL_S = 1.0  # between two looks at the lock of another host
_SHORT_S = 0.02
_JOIN_S = 5.0  # for a thread that may write the lock, if the storage is not away


class RunLock:
    """The lock of one run directory, which `take` takes and the end of the block releases.

        with RunLock() as lock:
            lock.take(run_dir)

    A run of several hosts takes it on rank 0 only.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
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
        self._path = run_dir / LOCK
        mine = replace(this_process(), token=secrets.token_hex(8))
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            _take(self._path, mine, tell)
        except OSError as error:
            self._remove_made()
            raise UserError(
                f"{run_dir} cannot be written ({error.strerror or error}): choose another --out"
            ) from None
        except BaseException:
            self._remove_made()
            raise
        self._mine = mine
        at_end.append(self.release)
        self._end.clear()
        self._refreshing = threading.Thread(target=self._refresh, name="run lock", daemon=True)
        self._refreshing.start()

    def release(self) -> None:
        """Gives the lock back, and removes folders that were created for it and are empty."""
        mine, self._mine = self._mine, None
        if mine is None:
            return
        self._end.set()
        # It may be about to write a removed lock again.
        if self._refreshing not in (None, threading.current_thread()):
            self._refreshing.join(_JOIN_S)
        with contextlib.suppress(ValueError):
            at_end.remove(self.release)
        assert self._path is not None
        with contextlib.suppress(OSError):
            if _token_of(self._path) == mine.token:
                self._path.unlink()
        self._remove_made()

    def _remove_made(self) -> None:
        for path in self._made:
            with contextlib.suppress(OSError):
                path.rmdir()
        self._made = []

    def _refresh(self) -> None:
        """Refreshes the lock until it is released; ends the process if another run has it."""
        path, mine = self._path, self._mine
        assert path is not None
        while mine is not None and not self._end.wait(REFRESH_S):
            with contextlib.suppress(OSError):  # the storage may be away for a moment
                if not path.exists():  # somebody removed it
                    _write_new(path, mine)
                if _token_of(path) == mine.token:
                    os.utime(path)
                    continue
                other = holder_of(path.parent)
                if other is None or self._end.is_set():
                    continue
                message = (
                    f"gridformer: {path} was taken by {other}, because this process did not "
                    f"refresh it for {STALE_S:g} s: it ends, so that no two runs write into one "
                    "folder\n"
                )
                os.write(2, message.encode())
                end_process(1)


def holder_of(run_dir: Path) -> Holder | None:
    """Returns who holds, or held, the lock of a run directory; None if there is none to read."""
    try:
        found = read_json(run_dir / LOCK, MIB)
        return Holder(
            host=str(found["host"]),
            pid=int(found["pid"]),
            since=float(found["since"]),
            command=str(found["command"]),
            machine=str(found["machine"]),
            began=int(found["began"]),
            token=str(found["token"]),
        )
    except (UnreadableError, ValueError, KeyError, TypeError, OverflowError):
        return None


def is_held(run_dir: Path) -> bool:
    """Returns whether a run holds the lock of a run directory, as far as one look can tell."""
    holder = holder_of(run_dir)
    if holder is None:
        return False
    if holder.is_here:
        return holder.runs
    try:
        return time.time() - (run_dir / LOCK).stat().st_mtime < STALE_S
    except OSError:
        return False


def _refusal(run_dir: Path, holder: Holder | None) -> UserError:
    return UserError(
        f"{run_dir} is in use by {holder or 'another run'}: wait until it ends, or choose another "
        "--out"
    )


def _take(path: Path, mine: Holder, tell: Callable[[str], None]) -> None:
    """Writes the lock as soon as there is none, or only a stale one.

    Raises:
        UserError: Another run holds it.
    """
    seen: tuple[str, float] | None = None  # the token and time of another host's lock
    since = time.monotonic()
    while True:
        if _write_new(path, mine):
            return
        holder = holder_of(path.parent)  # over NFS, opening it makes its time below a fresh one
        if holder is not None and holder.is_here:
            if holder.runs:
                raise _refusal(path.parent, holder)
            if _take_over(path, holder.token, mine):
                return
            time.sleep(_SHORT_S)  # another process takes it over
            continue
        try:
            refreshed = path.stat().st_mtime
        except FileNotFoundError:
            continue  # it was released
        found = (holder.token if holder else "", refreshed)
        if seen not in (None, found):
            raise _refusal(path.parent, holder)
        seen = found
        age = max(_now(path.parent) - refreshed, time.monotonic() - since)  # a clock may be ahead
        if age > STALE_S:
            if _take_over(path, found[0], mine):
                return
            time.sleep(_SHORT_S)
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
    name = sha256(token.encode()).hexdigest()[:16]
    claim = path.with_name(f".lock-claim-{name}")
    try:
        claim.open("x").close()
    except FileExistsError:
        with contextlib.suppress(OSError):  # of a process that was killed in the lines below
            if _now(path.parent) - claim.stat().st_mtime > STALE_S:
                claim.unlink()
        return False
    try:
        try:
            if _token_of(path) != token:
                return False  # another process was faster
        except FileNotFoundError:
            return False
        _displace(path, token)
        return _write_new(path, mine)
    finally:
        claim.unlink(missing_ok=True)


def _displace(path: Path, token: str) -> None:
    """Removes a stale lock, and no other that has taken its place in the meantime."""
    aside = path.with_name(f".lock-stale-{secrets.token_hex(8)}")
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
        try:
            if _token_of(aside) != token:
                with contextlib.suppress(OSError):
                    os.link(aside, path)
        finally:
            aside.unlink(missing_ok=True)


def _token_of(path: Path) -> str:
    """Returns the token in a lock file, or nothing if it is torn.

    Raises:
        OSError: It cannot be read.
    """
    try:
        return str(parse_json(regular_bytes(path, MIB))["token"])
    except (ValueError, KeyError, TypeError):
        return ""
