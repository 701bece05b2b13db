"""Starts the worker processes of a local run and ends the run when one fails or a signal stops it.

Security: a local run cannot be reached from other machines. Its processes rendezvous through a file
in a private folder, get arguments through pipes, and send tensors through sockets of loopback
(unless GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names another interface). torchrun and srun listen
on all interfaces without authentication: use them only on a trusted network of the job's machines.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from gridformer.launch.failures import Advise, Failure, general, kill_cause, oom_kills
from gridformer.launch.processes import (
    Signals,
    end_orphans,
    fork_server,
    how_it_ended,
    process_state,
    signals_seen,
    warm_up,
)
from gridformer.launch.worker_process import Meeting, work, work_here
from gridformer.mesh.launch_env import rank_env
from gridformer.utils.files import private_prefix, remove_private_leftovers
from gridformer.utils.process import leave_progress_bar, n_cores
from gridformer.utils.signals import REQUEUE, StopPolicy

# Workers end by themselves at the end of their grace period, unless one of them saves. Those that
# still run after this number of further seconds are killed.
_MORE_PATIENCE_S = 0.5
_LEAVES_S = 10.0  # for a worker that has saved to say so and to leave its groups
# How long the launcher waits for the rank that broke a connection after its peers have failed.
_LINGER_S = 3.0
_LOOK_S = 0.3  # between two looks for signals, and whether all workers are stopped
_EFFECTS_S = 30.0  # what fails so soon after a pause fails because of it
# The exit code that multiprocessing makes up for all workers if their fork server was killed.
_UNKNOWN = 255


def launch(
    entrypoint: Callable[..., None],
    args: tuple[Any, ...],
    n_processes: int,
    policy: StopPolicy | None = None,
    advise: Advise = general,
) -> None:
    """Runs `entrypoint(*args)` in every process of the run and returns when all are done.

    The entrypoint runs in this process if it is the only one, or if torchrun or srun started it.

    Args:
        entrypoint: A function at the top level of a module, whose `args` are picklable.
        n_processes: Number of processes of the whole run.
        policy: How the processes answer stop signals.
        advise: Called for what helps if memory was used up.

    Raises:
        UserError: A worker raised it.
        SystemExit: A worker failed (code 1; its traceback has been printed), or the run was stopped
            (code 75, or 128 + the signal's number; one line has been printed).
    """
    place, policy = rank_env(), policy or StopPolicy()
    if n_processes == 1 or place:
        work_here(entrypoint, args, place, policy)
        return
    with signals_seen(policy) as signals:
        if failure := attempt(entrypoint, args, n_processes, policy, signals):
            failure.report_and_exit(advise)


def attempt(
    entrypoint: Callable[..., None],
    args: tuple[Any, ...],
    n_processes: int,
    policy: StopPolicy,
    signals: Signals,
) -> Failure | None:
    """Runs workers in a private folder of their own. Returns why they failed or were stopped."""
    remove_private_leftovers()
    with tempfile.TemporaryDirectory(prefix=private_prefix()) as folder:  # mode 0700
        meeting = Meeting(Path(folder))
        workers = _Workers(n_processes, meeting, policy)
        try:
            workers.start(entrypoint, args, signals)
            failure = workers.watch(signals)
        finally:
            workers.kill()
        codes = workers.exit_codes()
        if codes != {0}:
            leave_progress_bar()
        # All ranks have saved before any of them exits with this code.
        saved = failure is None or failure.told_to_stop
        saved = saved and bool({REQUEUE, _UNKNOWN} & codes)
        if saved and meeting.stopped.exists():
            return Failure.stopped(meeting.stopped.read_text(encoding="utf-8"), REQUEUE)
        if saved and REQUEUE in codes and signals.first:
            # Its grace was over before it could write the cause there.
            return Failure.stopped(signal.Signals(signals.first).name, REQUEUE)
    if failure and not (failure.told_to_stop and signals.first):
        return failure
    if signals.first and codes != {0}:
        by = signal.Signals(signals.first).name
        again = ", twice: ended at once, no new checkpoint" if signals.again else ""
        return Failure.stopped(by + again, 128 + signals.first)
    return None


class _Workers:
    """The worker processes of a run, as the launcher sees them."""

    def __init__(self, size: int, meeting: Meeting, policy: StopPolicy) -> None:
        self.size, self.meeting, self.policy = size, meeting, policy
        self._server: int | None = None
        self._oom_kills = oom_kills()
        self._patience_s = policy.grace_s + _MORE_PATIENCE_S
        self._started: list[ForkServerProcess] = []
        self._saw_save = False  # when the time of the workers was over
        self._kill_at = float("inf")  # finite once a stop signal was sent to the workers
        self._ran, self._resumed, self._paused_s = time.monotonic(), float("-inf"), 0.0

    def start(
        self, entrypoint: Callable[..., None], args: tuple[Any, ...], signals: Signals
    ) -> None:
        """Starts all workers, or fewer if a stop signal arrives in the meantime."""
        warm_up(entrypoint.__module__)
        context = multiprocessing.get_context("forkserver")
        # CPU threads of each worker, unless the user has said how many
        threads = None if os.environ.get("OMP_NUM_THREADS") else max(1, n_cores() // self.size)
        self._server = fork_server()
        for rank in range(self.size):
            process = context.Process(
                target=work,
                args=(entrypoint, args, rank, self.size, self.meeting, threads, self.policy),
                name=f"rank {rank}",
            )
            self._ran = time.monotonic()
            try:
                process.start()
            except (OSError, EOFError):
                if not self._lost():
                    raise
                break  # `watch` ends the workers that were started
            if rank == 0:
                self._server = fork_server()
            self._started.append(process)
            if signals.first:
                # Not SIGINT: Python would print a traceback if the worker has no handlers yet.
                self._send_stop(signal.SIGTERM)
                break

    def watch(self, signals: Signals) -> Failure | None:
        """Waits until no worker is left; if one fails, the others are stopped.

        Returns the failure that explains the end, None if all succeeded or a signal came first.
        """
        stop_at = float("inf")
        failures: list[Failure] = []
        running = {process.sentinel: rank for rank, process in enumerate(self._started)}
        if len(self._started) < self.size and not signals.first and (how := self._lost()):
            return self._end_without_server(how)
        while running:
            now = time.monotonic()
            if signals.again or (now >= self._kill_at and not self._has_more_time(now)):
                self.kill()
                break
            if signals.first or now >= stop_at:
                self._send_stop(signals.first or signal.SIGTERM)
            until = min(self._kill_at, stop_at if not self._stopping else float("inf"))
            ready = wait(running, min(until - now, _LOOK_S))
            if self._are_paused(running.values()) and not self._stopping:
                self.kill()
                return self._paused()
            ended = [running.pop(sentinel) for sentinel in [*running] if sentinel in ready]
            for rank in ended:  # a worker that was killed in a save does not save anymore
                self.meeting.saving(rank).unlink(missing_ok=True)
            if ended and (how := self._lost()):
                lost = self._end_without_server(how)
                return None if signals.first else lost  # the signal may have been sent to all
            if self._stopping or signals.first:
                continue  # from here on workers end because they were stopped
            failures += [failure for rank in ended if (failure := self._failure(rank))]
            if any(failure.ends_all for failure in failures):
                self.kill()  # also workers that were stopped and hear no signal
                break
            if failures:
                stop_at = min(stop_at, time.monotonic() + self._time_left(failures))
        failure = min(failures, key=Failure.order, default=None)
        late = failure and (
            failure.caused_by_peer
            or failure.cause.startswith("The run hangs")
            or (failure.exitcode > 0 and not failure.message)
        )
        return self._paused() if late and self._resumed > self._ran - _EFFECTS_S else failure

    def kill(self) -> None:
        """Kills all workers that still run."""
        for process in self._started:
            if process.is_alive():
                process.kill()
        for process in self._started:
            process.join(1.0)

    def exit_codes(self) -> set[int | None]:
        """Returns the exit codes of all workers, once they have ended."""
        codes = {process.exitcode for process in self._started}
        return codes | ({None} if len(self._started) < self.size else set())

    def _are_paused(self, ranks: Iterable[int]) -> bool:
        """Returns whether all workers are stopped for too long; notes a pause that is over, too."""
        now, noted = time.monotonic(), self._resumed
        stopped = all(process_state(self._started[rank].pid or 0) in ("T", "t") for rank in ranks)
        if now - self._ran > self.policy.timeout_s + 2 * _LOOK_S:
            self._paused_s, self._resumed = now - self._ran, now
        if not stopped:
            self._ran = now
        # Seen twice, as this process may have been stopped, too, and go on before the workers.
        return stopped and self._resumed == now and now - noted < 3 * _LOOK_S

    def _paused(self) -> Failure:
        return Failure.of_run(
            f"All ranks were stopped for {self._paused_s:.0f} s, as by SIGSTOP or Ctrl-Z (limit: "
            f"{self.policy.timeout_s:g} s): the same command goes on from the newest checkpoint."
        )

    def _has_more_time(self, now: float) -> bool:
        """Returns whether workers whose time is over get more, because one saves or has saved."""
        saves, saved = self.meeting.is_saving(), self._saw_save
        if saves or saved:
            self._kill_at = now + (_MORE_PATIENCE_S if saves else _LEAVES_S)
        self._saw_save = saves
        return saves or saved

    def _time_left(self, failures: list[Failure]) -> float:
        """Returns how many seconds the others may go on; adds failures reported meanwhile."""
        if all(failure.told_to_stop for failure in failures):
            # The others have agreed to stop and may still be writing a checkpoint.
            return self._patience_s
        known = {failure.rank for failure in failures}
        for rank, process in enumerate(self._started):
            if rank not in known and self.meeting.error_file(rank).exists():
                failures.append(Failure(rank, process.pid, 1, self._read(rank)))
        if all(failure.caused_by_peer or failure.told_to_stop for failure in failures):
            return _LINGER_S
        self.meeting.failed.touch()
        return 0.0

    def _failure(self, rank: int) -> Failure | None:
        process = self._started[rank]
        process.join(1.0)
        if process.exitcode == 0:
            return None
        killer = ""
        if process.exitcode == -signal.SIGKILL:
            killer = kill_cause(self._oom_kills, oom_kills())
        code = 1 if process.exitcode is None else process.exitcode
        return Failure(rank, process.pid, code, self._read(rank), killer)

    def _read(self, rank: int) -> dict[str, Any]:
        path = self.meeting.error_file(rank)
        if not path.exists():
            return {}
        message: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["message"]
        return message

    def _lost(self) -> str:
        """Returns how the fork server has ended, or an empty text if it runs or nobody needs it."""
        codes = [process.exitcode for process in self._started]
        if self._server is None or (len(codes) == self.size and _UNKNOWN not in codes):
            return ""
        return "has ended" if fork_server() != self._server else how_it_ended(self._server)

    def _end_without_server(self, how: str) -> Failure:
        """Ends the workers when the fork server has ended, and returns what is to be told."""
        pids = [p.pid for p in self._started if p.pid and p.exitcode == _UNKNOWN]
        killed = end_orphans(pids, self._patience_s, self.meeting.is_saving)
        text = (
            f"The fork server (pid {self._server}), from which all ranks were started, {how}. "
            "Without it nothing is known of the ranks, so they were asked to save and to stop; the "
            "same command goes on from the newest checkpoint."
        )
        if killed:
            text += f" {killed} ranks did not end in time and were killed."
        return Failure.of_run(text)

    @property
    def _stopping(self) -> bool:
        return self._kill_at < float("inf")

    def _send_stop(self, signum: int) -> None:
        """Sends a stop signal, only once; workers that still run some time later are killed."""
        if self._stopping:
            return
        self._kill_at = time.monotonic() + self._patience_s
        for process in self._started:
            if process.pid and process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signum)
