"""How local worker processes start, and how a run ends when one of them fails or is told to stop.

    launch(worker, (plan,), n_processes)        # in the command line's process
        def worker(plan): world = init_world(...); ...; close_world()

One process, or one that torchrun or srun has started: the entrypoint runs right here. Otherwise
worker processes are started and watched here.

Who can reach a run from outside: nobody, when it is local. Its processes meet in a file of a folder
that only this user can open, what `launch` hands to them travels through pipes, and the sockets
through which they send tensors are bound to loopback (unless GLOO_SOCKET_IFNAME or
NCCL_SOCKET_IFNAME names another interface). Under torchrun and srun that is not so: torchrun's
rendezvous and the store of both listen on all interfaces, ask nobody who they are, and torchrun's
agent unpickles what it is sent. Use them on a network that you trust, of this job's machines alone.

Exit codes: 0 done; 1 a worker failed (its traceback is the last thing printed); 2 a UserError;
130, 143, 129 stopped by SIGINT, SIGTERM, SIGHUP.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from gridformer.launch.worker_process import Meeting, print_last, print_stopped, work, work_here
from gridformer.mesh.launch_env import joined
from gridformer.utils import signals as stopping
from gridformer.utils.errors import ConfigError, UserError
from gridformer.utils.forkserver import warm_up
from gridformer.utils.threads import threads_of

# Workers end themselves stopping.GRACE_S after a stop signal; later than this they are killed.
_PATIENCE_S = stopping.GRACE_S + 0.5
# How long after workers whose peer broke the connection that peer itself is waited for.
_LINGER_S = 3.0


def launch(entrypoint: Callable[..., None], args: tuple[Any, ...], n_processes: int) -> None:
    """Run `entrypoint(*args)` on every process of the run; returns when all are done.

    A process that torchrun or srun has started ends here if the entrypoint raises while it is in a
    process group, after the failure has been reported: its peers wait for it until it has gone.

    Args:
        entrypoint: a function at the top level of a module.
        args: picklable.
        n_processes: of the whole run. See `check_devices` for what to check first.

    Raises:
        UserError: raised by a worker.
        SystemExit: a worker failed (1; its traceback has been printed) or the run was stopped by a
            signal (128 + its number; one line has been printed).
    """
    place = joined()
    if n_processes == 1 or place:
        work_here(entrypoint, args, place)
        return
    with (
        _signals() as signals,
        tempfile.TemporaryDirectory(prefix="gridformer-") as folder,  # mode 0700
    ):
        workers = _Workers(n_processes, Meeting(Path(folder)))
        try:
            workers.start(entrypoint, args, signals)
            failure = workers.watch(signals)
        finally:
            workers.kill()
    if failure and not (failure.told_to_stop and signals.first):
        _report(failure)
    if signals.first:
        print_stopped(signal.Signals(signals.first).name)
        raise SystemExit(128 + signals.first)


# --------------------------------------------------------------------------- the workers


class _Workers:
    """The worker processes of a run, seen from the launcher."""

    def __init__(self, size: int, meeting: Meeting) -> None:
        self.size, self.meeting = size, meeting
        self._started: list[ForkServerProcess] = []
        self._kill_at = float("inf")  # finite when the workers have been told to end

    def start(
        self, entrypoint: Callable[..., None], args: tuple[Any, ...], signals: _Signals
    ) -> None:
        """Start all, or those up to the moment when a signal asks to stop."""
        warm_up(entrypoint.__module__)
        context = multiprocessing.get_context("forkserver")
        threads = threads_of(self.size)
        for rank in range(self.size):
            process = context.Process(
                target=work,
                args=(entrypoint, args, rank, self.size, self.meeting, threads),
                name=f"rank {rank}",
            )
            process.start()
            self._started.append(process)
            if signals.first:
                # SIGINT would make Python print a traceback before the worker listens to signals.
                self._tell(signal.SIGTERM)
                break

    def watch(self, signals: _Signals) -> Failure | None:
        """Wait until no worker is left.

        The others are told to end when one fails. Returns the failure that explains the run's end;
        None when all is done, or a signal came first.
        """
        tell_at = float("inf")
        found: list[Failure] = []
        running = {process.sentinel: rank for rank, process in enumerate(self._started)}
        while running:
            now = time.monotonic()
            if now >= self._kill_at:
                self.kill()
                break
            if signals.first or now >= tell_at:
                self._tell(signals.first or signal.SIGTERM)
            until = min(self._kill_at, tell_at if not self._told else float("inf"))
            ready = wait([*running, signals.reader], None if until == float("inf") else until - now)
            signals.clear()
            ended = [running.pop(s) for s in ready if s in running]
            if self._told or signals.first:
                continue  # from here on they end because they were told to
            found += [failure for rank in ended if (failure := self._failure(rank))]
            if found:
                tell_at = min(tell_at, time.monotonic() + self._lingering(found))
        return min(found, key=Failure.order, default=None)

    def kill(self) -> None:
        """Leave no worker behind."""
        for process in self._started:
            if process.is_alive():
                process.kill()
        for process in self._started:
            process.join(1.0)

    def _lingering(self, found: list[Failure]) -> float:
        """How long the others may go on; those that failed unseen are added to `found`."""
        if all(failure.told_to_stop for failure in found):
            return _PATIENCE_S  # the others have agreed to stop, and may be writing still
        known = {failure.rank for failure in found}
        for rank, process in enumerate(self._started):  # wrote why it failed, and has not ended yet
            if rank not in known and self.meeting.error_file(rank).exists():
                found.append(Failure(rank, process.pid, None, self._read(rank)))
        if all(failure.caused_by_peer or failure.told_to_stop for failure in found):
            return _LINGER_S
        self.meeting.failed.touch()
        return 0.0

    def _failure(self, rank: int) -> Failure | None:
        process = self._started[rank]
        process.join(1.0)
        if process.exitcode == 0:
            return None
        return Failure(rank, process.pid, process.exitcode, self._read(rank))

    def _read(self, rank: int) -> dict[str, Any]:
        path = self.meeting.error_file(rank)
        if not path.exists():
            return {}
        message: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["message"]
        return message

    @property
    def _told(self) -> bool:
        return self._kill_at < float("inf")

    def _tell(self, signum: int) -> None:
        """Tell those that are left to end, once: who is left after our patience will be killed."""
        if self._told:
            return
        self._kill_at = time.monotonic() + _PATIENCE_S
        for process in self._started:
            if process.pid and process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signum)


class Failure:
    """How a worker ended that did not end well. `message` is what it said itself, if it could."""

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
    def told_to_stop(self) -> bool:
        return not self.message and self.exitcode - 128 in stopping.SIGNALS

    def order(self) -> tuple[int, float]:
        """What explains a run's end comes first: a worker that was killed, or crashed, before those
        that raised, and before those whose connection broke.

        Not so for SIGABRT: NCCL's watchdog ends a worker with it, long after a peer has failed.
        """
        killed = self.exitcode < 0 and -self.exitcode != signal.SIGABRT and not self.message
        return (
            0 if killed else 3 if self.told_to_stop else 2 if self.caused_by_peer else 1,
            self.time,
        )


def _report(failure: Failure) -> NoReturn:
    """Tell why a worker failed, and leave with the right exit code."""
    rank, message, exitcode = failure.rank, failure.message, failure.exitcode
    if "user_error" in message:
        if message.get("problems"):
            raise ConfigError(message["problems"])
        raise UserError(message["user_error"])
    if message:
        print_last(f"rank {rank} failed:\n\n{message['extraInfo']['py_callstack'].rstrip()}")
        raise SystemExit(1)
    who = f"rank {rank} (pid {failure.pid})"
    if failure.told_to_stop:
        print_stopped(f"{signal.Signals(exitcode - 128).name} sent to rank {rank}")
        raise SystemExit(exitcode)
    if exitcode >= 0:
        print_last(f"{who} exited with code {exitcode} and no error message")
        raise SystemExit(1)
    cause = "a crash in native code: see what it printed above"
    if -exitcode == signal.SIGKILL:
        cause = (
            "out of memory is the usual cause: try a smaller batch, more micro_batches, or a "
            "layout that splits the model further"
        )
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:  # a real-time signal
        name = "no name"
    print_last(f"{who} was killed by signal {-exitcode} ({name}): {cause}")
    raise SystemExit(1)


# --------------------------------------------------------------------------- signals


@dataclass
class _Signals:
    """The first stop signal that the launcher got; something can be read when one has come."""

    reader: int
    writer: int
    first: int | None = None

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.reader, 64)

    def note(self, signum: int, frame: FrameType | None) -> None:
        """A handler of Python's `signal`. Later signals change nothing."""
        self.first = self.first or signum
        with contextlib.suppress(BlockingIOError):
            os.write(self.writer, b"\0")


@contextlib.contextmanager
def _signals() -> Iterator[_Signals]:
    """Take stop signals inside the block; a SIGHUP that nohup ignores stays ignored."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signals = _Signals(reader, writer)
    before: dict[int, Any] = {}
    try:
        for signum in stopping.SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                before[signum] = signal.signal(signum, signals.note)
        yield signals
    finally:
        for signum, handler in before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        os.close(reader)
        os.close(writer)
