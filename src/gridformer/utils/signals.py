"""Stop requests: signals such as Ctrl-C and SIGTERM, as a flag that a training loop polls.

The main thread may be inside C++ code for minutes, during which Python's signal handlers do not
run. Only the C part of the handler runs: it writes the signal's number to the wake-up descriptor,
which a thread of this module reads. (`sigwait` would not do: threads of libraries take the signal.)
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

GRACE_S = 3.5  # of commands that do not train
REQUEUE = 75  # the exit code of a run that was stopped from outside and saved: start it again
MAX_HOURS = "train.max_hours"  # what stopped a run whose time was over
# They mean that the user stopped the run, unless a policy says otherwise.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# One Ctrl-C reaches a worker of torchrun twice: from the terminal, and from torchrun.
TWICE_BY_TORCHRUN_S = 2.0

_installed: StopRequest | None = None
# Functions that `end_process` calls before it ends the process, such as one that gives back a lock.
at_end: list[Callable[[], None]] = []


@dataclass(frozen=True)
class StopPolicy:
    """How a process answers stop signals."""

    # Seconds from the first signal after which a process is ended by force, unless it saves
    grace_s: float = GRACE_S
    # Names of the signals after which a run that has saved exits with `REQUEUE`
    requeue: tuple[str, ...] = ()
    # A second Ctrl-C ends the process if it comes later than this; infinity leaves that to others
    again_after_s: float = 0.0
    ends_at: float | None = None  # the `time.time` at which a run must have saved and ended
    timeout_s: float = 600.0  # after which a launcher ends processes that all are stopped

    @property
    def signals(self) -> tuple[signal.Signals, ...]:
        """All signals that are caught."""
        return tuple(dict.fromkeys((*SIGNALS, *(signal.Signals[name] for name in self.requeue))))


def install(policy: StopPolicy | None = None) -> StopRequest:
    """Starts to listen for stop signals in this process; later calls return the same listener.

    The first call must be in the main thread, or Python raises ValueError.
    """
    global _installed
    _installed = _installed or StopRequest(policy or StopPolicy())
    return _installed


class StopRequest:
    """Whether this process was asked to stop, and by what. `install` creates it.

    Attributes:
        is_hopeless: Is asked when a signal arrives: if True, the process ends at once, because
            nothing can be saved anymore.
        on_hold: Is called when a save begins (True) and ends (False).
        report: Writes why this process fails; `reported` says whether it was called.
        cause: The name of the signal, such as `SIGINT`, or `MAX_HOURS`; empty without a request.
    """

    def __init__(self, policy: StopPolicy) -> None:
        self.policy = policy
        self.grace_s = policy.grace_s
        self.is_hopeless: Callable[[], bool] = lambda: False
        self.on_hold: Callable[[bool], None] = lambda begins: None
        self.report: Callable[[Exception], None] = lambda error: None
        self.reported = False
        self.cause = ""
        self._told: list[Callable[[], None]] = []
        self._outcome = ""
        self._since = 0.0
        self._holds = 0
        self._lock = threading.Lock()
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._old_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._old_handlers: dict[int, Any] = {}
        for signum in policy.signals:
            if signum == signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN:
                continue  # nohup started the process, which must outlive the terminal
            # A handler must exist for the wake-up descriptor to be written.
            self._old_handlers[signum] = signal.signal(signum, lambda *_: None)
        self._thread = threading.Thread(target=self._listen, name="stop signals", daemon=True)
        self._thread.start()

    def report_now(self, error: Exception) -> None:
        """Writes why this process fails before it ends, because it may be ended at any moment."""
        if not self.requested and not self.reported:
            self.report(error)
            self.reported = True

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop."""
        return bool(self.cause)

    @property
    def exit_code(self) -> int:
        """0 if nobody asked or the run was done, `REQUEUE` after a save, else 128 + the signal."""
        if not self.cause or self._outcome == "done":
            return 0
        if self._outcome == "saved" and self.cause in (MAX_HOURS, *self.policy.requeue):
            return REQUEUE
        return 1 if self.cause == MAX_HOURS else 128 + signal.Signals[self.cause]

    @property
    def seconds_left(self) -> float:
        """Seconds until this process is ended by force; infinity without a signal."""
        if not self._since:
            return float("inf")
        return self._since + self.grace_s - time.monotonic()

    def ask(self, cause: str) -> None:
        """Asks this process to stop, for `MAX_HOURS` or a peer's signal, in its own time."""
        if not self.cause:
            self.cause = cause
            for told in self._told:
                told()

    def tell(self, told: Callable[[], None]) -> None:
        """Calls a function as soon as this process is asked to stop, in any thread."""
        self._told.append(told)
        if self.cause:
            told()

    def saved(self) -> None:
        """Notes that no work of this run is lost if it ends now."""
        self._outcome = "saved"

    def done(self) -> None:
        """Notes that the run has reached its end, whether or not it was asked to stop."""
        self._outcome = "done"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside this block, which saves, the process is not ended when the grace period ends."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    def hold(self) -> None:
        """Begins a save that must not be cut off; `release` ends it. Any thread may call both."""
        self._count(1)

    def release(self) -> None:
        """Ends what `hold` began."""
        self._count(-1)

    def _count(self, change: int) -> None:
        with self._lock:
            before, self._holds = self._holds, self._holds + change
            if not before or not self._holds:
                self.on_hold(self._holds > 0)

    def uninstall(self) -> None:
        """Restores the previous signal handlers; `requested` keeps its value."""
        global _installed
        for signum, handler in self._old_handlers.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._old_fd)
        os.write(self._write_fd, b"\0")  # ends the thread
        self._thread.join()
        os.close(self._read_fd)
        os.close(self._write_fd)
        if _installed is self:
            _installed = None

    def nothing_left_to_save(self) -> None:
        """Makes later stop signals end the process at once, as its work is done or has failed."""
        self.grace_s = 0.0

    def _listen(self) -> None:
        while True:
            timeout = self.seconds_left
            if timeout <= 0:
                if not self._holds:
                    if self.grace_s and not self._outcome:
                        why = f"the step did not end within {self.grace_s:g} s"
                        self.tell_nothing_was_saved(why)
                    end_process(self.exit_code)
                timeout = 0.1
            ready, _, _ = select.select([self._read_fd], [], [], min(timeout, 3600.0))
            if not ready:
                continue
            for signum in os.read(self._read_fd, 64):
                if signum == 0:
                    return
                if signum in self._old_handlers:
                    self._arrived(signal.Signals(signum))

    def _arrived(self, signum: signal.Signals) -> None:
        now = time.monotonic()
        if not self._since:
            self._since = now
            self.ask(signum.name)
            if self.is_hopeless():
                self.nothing_left_to_save()
        elif (
            signum == signal.SIGINT
            and self.cause == "SIGINT"
            and now - self._since > self.policy.again_after_s
        ):
            self._print("twice: ended at once, no new checkpoint")
            end_process(128 + signal.SIGINT)

    def tell_nothing_was_saved(self, why: str) -> None:
        """Prints, on rank 0 only, that the work since the last checkpoint is lost and why."""
        self._print(f"but {why}: no new checkpoint")

    def _print(self, what: str) -> None:
        if os.environ.get("RANK", "0") == "0":
            message = f"gridformer: {self.cause}, {what}\n"
            os.write(2, message.encode())  # sys.stderr's lock may be held by the main thread


def end_process(code: int) -> NoReturn:
    """Ends this process at once, whatever its threads do, after it flushes what was printed."""
    for last in (sys.stdout.flush, sys.stderr.flush, *at_end):
        # In a separate thread, because a stuck main thread may hold the lock of the stream.
        thread = threading.Thread(target=last, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no memory is left for its stack
            with suppress(Exception):
                last()
            continue
        thread.join(0.1)
    os._exit(code)
