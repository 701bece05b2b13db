"""A `gridformer train` that is watched from outside, with all processes it has started."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

LIMIT_S = 180.0  # far longer than anything here takes, because others may use the machine
_POLL_S = 0.02
_ORPHANS_S = 20.0


class LateError(Exception):
    """Something did not happen in time."""


class Started:
    """A started command; `trained` says whether it was seen to train.

    Args:
        words: The words after `gridformer`.
        log: Where its output goes, with `.out` and `.err` added.
        temporary: The folder for its temporary files.
    """

    def __init__(self, words: list[str], log: Path, temporary: Path) -> None:
        self.trained = False
        self._out, self._err = log.with_suffix(".out"), log.with_suffix(".err")
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gridformer", *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, "TMPDIR": str(temporary)},
                start_new_session=True,  # by which all its processes are found
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def code(self) -> int | None:
        """The exit code, once it has ended."""
        return self.process.poll()

    def said(self) -> str:
        """Returns what it has printed, errors last."""
        return self._out.read_text(errors="replace") + self._err.read_text(errors="replace")

    def resumed_from(self) -> int:
        """Returns the step from which it has resumed; 0 if it began anew."""
        found = re.search(r"resuming after step (\d+)", self.said())
        return int(found[1]) if found else 0

    def trains(self, out: Path) -> bool:
        """Returns whether it has come as far as training in a run directory."""
        try:
            beat = json.loads((out / "heartbeat.json").read_text())
            found = os.getsid(beat["pid"]) == self.pid and beat["state"] != "starting"
        except (OSError, ValueError):
            return False
        self.trained = self.trained or found
        return bool(found)

    def wait_until(self, happened: Callable[[], bool]) -> bool:
        """Waits for something; returns False if the command has ended before.

        Raises:
            LateError: Neither has come.
        """
        until = time.monotonic() + LIMIT_S
        while not happened():
            if self.code is not None:
                return happened()
            if time.monotonic() > until:
                raise LateError(f"nothing happened within {LIMIT_S:g} s")
            time.sleep(_POLL_S)
        return True

    def end(self) -> int:
        """Waits for its end and returns the exit code.

        Raises:
            LateError: It does not end.
        """
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise LateError(f"it has not ended within {LIMIT_S:g} s") from None

    def left(self) -> list[str]:
        """Waits until none of its processes runs, and returns the names of those that still do."""
        until = time.monotonic() + _ORPHANS_S
        while (found := [*self._members()]) and time.monotonic() < until:
            time.sleep(_POLL_S)
        return [f"{_name(pid)} (pid {pid})" for pid in found]

    def kill_all(self) -> None:
        """Ends whatever is left of it."""
        for pid in self._members():
            _send(pid, signal.SIGKILL)
        self.process.wait()

    def rank(self, rank: int) -> int:
        """Returns the process of a rank, which keeps a file that only ranks have."""
        for pid in self._members():
            try:
                maps = Path(f"/proc/{pid}/maps").read_text()
            except OSError:
                continue
            if re.search(rf"/progress-{rank}$", maps, re.MULTILINE):
                return pid
        raise LateError(f"rank {rank} does not run")

    def fork_server(self) -> int:
        """Returns the process from which the ranks were forked."""
        return _parent(self.rank(0))

    def _members(self) -> Iterator[int]:
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    if os.getsid(int(name)) == self.pid and _state(int(name)) != "Z":
                        yield int(name)
                except OSError:
                    continue


def _send(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _state(pid: int) -> str:
    return _stat(pid)[0]


def _parent(pid: int) -> int:
    return int(_stat(pid)[1])


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[-80:]
    except OSError:
        return "a process"
