"""Stop requests: SIGINT (Ctrl-C), SIGTERM and SIGHUP, as a flag that a training loop polls.

    stop = stopping.install()
    for step in ...:
        train(step)
        if agree_on_all_ranks(stop.requested):
            save_checkpoint()
            return                      # the launcher exits with stop.exit_code

A process that does not end within the grace period is ended by force, because it may be blocked in
a long step, or in a collective whose peers are gone.

The main thread may be inside C++ code for minutes, during which Python's signal handlers do not
run. Only the C part of the handler runs, on a thread that the system chooses, and it writes the
signal's number to the wake-up descriptor, which a thread of this module reads. (Blocking the
signals and waiting in `sigwait` would not work, because threads that libraries start at import
would take the signal.)
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

GRACE_S = 3.5  # with the time that the launcher needs to exit, the run ends within 5 s
SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)

_installed: StopRequest | None = None
# What `end_process` does before it ends the process, such as giving back a lock.
at_end: list[Callable[[], None]] = []


def install(grace_s: float = GRACE_S) -> StopRequest:
    """Starts to listen for stop signals in this process; later calls return the same listener.

    Args:
        grace_s: seconds from the first signal after which the process is ended by force.

    Raises:
        RuntimeError: the first call is not from the main thread.
    """
    global _installed
    if _installed is None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("stopping.install() must first be called in the main thread")
        _installed = StopRequest(grace_s)
    return _installed


class StopRequest:
    """Holds whether a signal asked this process to stop, and which one. `install` creates it.

    `is_hopeless` may be set to a function that is called when a signal arrives. If it returns True,
    the process ends at once, because nothing can be saved anymore.
    """

    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self.is_hopeless: Callable[[], bool] = lambda: False
        self._signum: int | None = None
        self._since = 0.0
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._old_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._old_handlers: dict[int, Any] = {}
        for signum in SIGNALS:
            if signum == getattr(signal, "SIGHUP", None) and (
                signal.getsignal(signum) is signal.SIG_IGN
            ):
                continue  # nohup started the process, which must outlive the terminal
            self._old_handlers[signum] = signal.signal(signum, _ignore)
        self._thread = threading.Thread(target=self._listen, name="stop signals", daemon=True)
        self._thread.start()

    @property
    def requested(self) -> bool:
        """Whether a stop signal has arrived."""
        return self._signum is not None

    @property
    def exit_code(self) -> int:
        """The exit code that shells expect after this signal: 130, 143 or 129; 0 for no signal."""
        return 0 if self._signum is None else 128 + self._signum

    @property
    def signal_name(self) -> str:
        """The name of the signal, such as `SIGINT`, or an empty string without a signal."""
        return "" if self._signum is None else signal.Signals(self._signum).name

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
            timeout = (
                None if self._signum is None else self._since + self.grace_s - time.monotonic()
            )
            if timeout is not None and timeout <= 0:
                self._give_up()
            ready, _, _ = select.select([self._read_fd], [], [], timeout)
            if not ready:
                continue
            for signum in os.read(self._read_fd, 64):
                if signum == 0:
                    return
                if signum in self._old_handlers and self._signum is None:
                    self._since = time.monotonic()
                    self._signum = signum
                    if self.is_hopeless():
                        self.nothing_left_to_save()

    def _give_up(self) -> None:
        if self.grace_s:
            self.tell_nothing_was_saved(f"the step did not end within {self.grace_s:g} s")
        end_process(self.exit_code)

    def tell_nothing_was_saved(self, why: str) -> None:
        """Prints, on rank 0 only, that the work since the last checkpoint is lost and why."""
        if os.environ.get("RANK", "0") == "0":
            message = f"gridformer: {self.signal_name}, but {why}: no new checkpoint\n"
            os.write(2, message.encode())  # sys.stderr's lock may be held by the main thread


def end_process(code: int) -> NoReturn:
    """Ends this process at once, whatever its threads do, after it flushes what was printed."""
    for last in (sys.stdout.flush, sys.stderr.flush, *at_end):
        # In a separate thread, because a stuck main thread may hold the lock of the stream.
        thread = threading.Thread(target=last, daemon=True)
        thread.start()
        thread.join(0.1)
    os._exit(code)


def _ignore(signum: int, frame: FrameType | None) -> None:
    """Does nothing. A handler must exist for the wake-up descriptor to be written."""
