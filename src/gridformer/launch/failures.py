"""What a failure is, which one of a run explains its end, and how it is told."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from gridformer.launch.memory_advice import GENERAL
from gridformer.launch.processes import signal_text
from gridformer.utils import files, oom, signals
from gridformer.utils.errors import ConfigError, UserError
from gridformer.utils.units import format_bytes

Advise = Callable[[], str]  # returns a part of a sentence
_ASKED_CPU = re.compile(r"you tried to allocate (\d+) bytes", re.IGNORECASE)
_ASKED_GPU = re.compile(r"Tried to allocate ([\d.]+ [KMGT]iB)")
_OF_GPU = re.compile(r"total capacity of ([\d.]+ [KMGT]iB)")
_ASKED_NUMPY = re.compile(r"Unable to allocate ([\d.]+ [KMGT]?i?B)")


def general() -> str:
    """Returns what helps any run that needs too much memory."""
    return GENERAL


class Failure:
    """A worker that failed.

    Args:
        rank, pid, exitcode: What it was and how it ended; no exit code if it has not ended yet.
        message: The report that it wrote, empty if it wrote none.
        killer: Who killed it, see `gridformer.utils.oom.kill_cause`.
    """

    def __init__(
        self,
        rank: int,
        pid: int | None,
        exitcode: int | None,
        message: dict[str, Any],
        killer: str = "",
    ) -> None:
        self.rank, self.pid, self.message, self.killer = rank, pid, message, killer
        self.exitcode = 1 if exitcode is None else exitcode
        self.time: float = message.get("time", time.time())

    @property
    def caused_by_peer(self) -> bool:
        """Whether it only follows from the failure of another rank."""
        return bool(self.message.get("caused_by_peer"))

    @property
    def is_user_error(self) -> bool:
        """Whether a user can change what went wrong, so that it would go wrong again."""
        return "user_error" in self.message

    @property
    def ends_all(self) -> bool:
        """Whether no rank can do anything anymore: the run hangs, lost its ranks, cannot save.

        A rank that only knows that another one could not save does not end that one, which says
        why.
        """
        return self.has_report and not self.caused_by_peer

    @property
    def has_report(self) -> bool:
        """Whether the worker wrote all that is to be printed."""
        return "report" in self.message

    @property
    def told_to_stop(self) -> bool:
        """Whether it ended because a signal told it to stop."""
        codes = (signals.REQUEUE, *(128 + signum for signum in signals.SIGNALS))
        return not self.message and self.exitcode in codes

    def order(self) -> tuple[int, float]:
        """Sort key that puts the failure that explains the end of the run first.

        A worker that was killed or crashed comes before those that raised, and these come before
        those whose connection broke. SIGABRT is an exception: NCCL's watchdog ends a worker with it
        long after a peer has failed.
        """
        killed = self.exitcode < 0 and -self.exitcode != signal.SIGABRT and not self.message
        return (
            0 if killed else 3 if self.told_to_stop else 2 if self.caused_by_peer else 1,
            self.time,
        )


def report_and_exit(failure: Failure, advise: Advise = general) -> NoReturn:
    """Prints why a worker failed and exits with the matching code, or raises its UserError.

    Args:
        failure: The failure.
        advise: Called for what helps if memory was used up.

    Raises:
        UserError: The worker raised it.
        SystemExit: In all other cases.
    """
    message, exitcode = failure.message, failure.exitcode
    if failure.is_user_error:
        if message.get("problems"):
            raise ConfigError(message["problems"])
        error = UserError(message["user_error"])
        error.exit_code = message["exit_code"]
        raise error
    if failure.told_to_stop:
        requeue = exitcode == signals.REQUEUE
        name = "" if requeue else signal.Signals(exitcode - 128).name
        by = f"{name} sent to rank {failure.rank}"
        print_stopped(f"a signal or {signals.MAX_HOURS}" if requeue else by, exitcode)
        raise SystemExit(exitcode)
    print_last(failure_text(failure, advise))
    raise SystemExit(1)


def failure_text(failure: Failure, advise: Advise = general) -> str:
    """Returns all that is known of a failure that is no UserError: lines, the cause last.

    Args:
        failure: The failure.
        advise: Called for what helps if memory was used up.
    """
    message = failure.message
    if failure.has_report:
        return str(message["report"])
    if message:
        means = f" {message['meaning']}" if message.get("meaning") else ""
        if message.get("out_of_memory"):
            means += f"; {advise()}"
        return (
            f"rank {failure.rank} failed:{means}\n\n{message['extraInfo']['py_callstack'].rstrip()}"
        )
    advice = ""
    if -failure.exitcode == signal.SIGKILL:
        if oom.is_oom(failure.killer):
            advice = f": {advise()}"
        elif not failure.killer:
            advice = f": out of memory is the usual cause: {advise()}"
    elif failure.exitcode < 0:
        advice = ": it crashed in native code, see its output above"
    return f"{cause(failure)}{advice}"


def cause(failure: Failure) -> str:
    """Returns why a worker failed, in one line."""
    if failure.has_report:
        return str(failure.message["message"])
    if failure.message:
        whole = str(failure.message["message"])
        return f"rank {failure.rank} failed: {whole.strip().splitlines()[0]}"
    who = f"rank {failure.rank} (pid {failure.pid})"
    if failure.exitcode >= 0:
        return f"{who} exited with code {failure.exitcode} and no error message"
    by = f" {failure.killer}" if failure.killer else ""
    return f"{who} was killed by {signal_text(-failure.exitcode)}{by}"


def cause_of(error: BaseException) -> str:
    """Returns what an error means and what to do, or an empty text if it speaks for itself."""
    if (text := out_of_memory(error)) is not None:
        return text
    if files.is_full(error):
        assert isinstance(error, OSError)
        return files.full_disk_message(error) + "; free some, or choose --out on another disk"
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{os.strerror(error.errno).lower()}: raise the limit, such as by `ulimit -n 4096`"
    return ""


def out_of_memory(error: BaseException) -> str | None:
    """Returns what was asked for if an error means that memory is used up, otherwise None."""
    text = str(error)
    if type(error).__name__ == "OutOfMemoryError":  # torch's, without importing torch
        asked = _found(_ASKED_GPU, text)
        whole = _found(_OF_GPU, text)
        of = f" of {whole}" if whole else ""
        return f"the memory of the GPU{of} is used up" + (
            f": {asked} more were asked for" * bool(asked)
        )
    host = "the memory of this machine, or what this process may have of it, is used up"
    if found := _ASKED_CPU.search(text):
        return host + _more(format_bytes(int(found[1])))
    if isinstance(error, MemoryError):
        return host + _more(_found(_ASKED_NUMPY, text))
    return None


def _more(asked: str) -> str:
    return f": {asked} more were asked for" if asked else ""


def _found(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[1] if found else ""


def print_stopped(by: str, code: int = 0) -> None:
    """Prints the one line with which a run ends that was stopped.

    Args:
        by: What stopped it, for example the name of a signal.
        code: The exit code.
    """
    requeue = f"; exit code {code}: start it again to go on" if code == signals.REQUEUE else ""
    print_last(f"gridformer: stopped by {by.replace('SIGINT', 'Ctrl-C (SIGINT)', 1)}{requeue}")


def print_last(text: str) -> None:
    """Prints to standard error, after everything that has been printed to standard output."""
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
