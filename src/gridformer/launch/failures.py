"""Failures of workers as the launcher sees them: which one explains the end, and how it is told."""

from __future__ import annotations

import signal
import time
from typing import Any, NoReturn

from gridformer.launch.worker_process import print_last, print_stopped
from gridformer.utils import signals as stopping
from gridformer.utils.errors import ConfigError, UserError


class Failure:
    """A worker that failed. `message` is the report that it wrote, empty if it wrote none."""

    def __init__(
        self, rank: int, pid: int | None, exitcode: int | None, message: dict[str, Any]
    ) -> None:
        self.rank, self.pid, self.message = rank, pid, message
        self.exitcode = 1 if exitcode is None else exitcode
        self.time: float = message.get("time", time.time())

    @property
    def caused_by_peer(self) -> bool:
        return bool(self.message.get("caused_by_peer"))

    @property
    def ends_all(self) -> bool:
        """Whether the run hangs, so that no rank can do anything anymore."""
        return "report" in self.message

    @property
    def told_to_stop(self) -> bool:
        codes = (stopping.REQUEUE, *(128 + signum for signum in stopping.SIGNALS))
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


def report(failure: Failure) -> NoReturn:
    """Prints why a worker failed and exits with the matching code, or raises its UserError.

    Raises:
        UserError: the worker raised it.
        SystemExit: in all other cases.
    """
    rank, message, exitcode = failure.rank, failure.message, failure.exitcode
    if "user_error" in message:
        if message.get("problems"):
            raise ConfigError(message["problems"])
        raise UserError(message["user_error"])
    if failure.ends_all:
        print_last(message["report"])
        raise SystemExit(1)
    if message:
        print_last(f"rank {rank} failed:\n\n{message['extraInfo']['py_callstack'].rstrip()}")
        raise SystemExit(1)
    who = f"rank {rank} (pid {failure.pid})"
    if exitcode == stopping.REQUEUE:
        print_stopped(f"a signal to rank {rank} or {stopping.MAX_HOURS}", exitcode)
        raise SystemExit(exitcode)
    if failure.told_to_stop:
        print_stopped(f"{signal.Signals(exitcode - 128).name} sent to rank {rank}")
        raise SystemExit(exitcode)
    if exitcode >= 0:
        print_last(f"{who} exited with code {exitcode} and no error message")
        raise SystemExit(1)
    cause = "it crashed in native code, see its output above"
    if -exitcode == signal.SIGKILL:
        cause = (
            "out of memory is the usual cause: try a smaller batch, more micro_batches, or a "
            "layout that shards the model further"
        )
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = "a real-time signal"
    print_last(f"{who} was killed by signal {-exitcode} ({name}): {cause}")
    raise SystemExit(1)
