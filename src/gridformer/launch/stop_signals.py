"""The stop signals that the launcher of a run receives while its workers run."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from gridformer.utils.signals import StopPolicy


@dataclass
class Signals:
    """The first stop signal that the launcher received; `reader` is readable once one arrived.

    `again` says whether that was Ctrl-C, and a second Ctrl-C came.
    """

    reader: int
    writer: int
    first: int | None = None
    again: bool = False

    def clear(self) -> None:
        """Empties `reader`, so that only the next signal makes it readable."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.reader, 64)

    def note(self, signum: int, frame: FrameType | None) -> None:
        """Handler for Python's `signal` module."""
        self.again = self.again or self.first == signum == signal.SIGINT
        self.first = self.first or signum
        with contextlib.suppress(BlockingIOError):
            os.write(self.writer, b"\0")


@contextlib.contextmanager
def signals_seen(policy: StopPolicy) -> Iterator[Signals]:
    """Catches stop signals inside the block. A SIGHUP that nohup ignores stays ignored."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signals = Signals(reader, writer)
    before: dict[int, Any] = {}
    try:
        for caught in policy.signals:
            if signal.getsignal(caught) is not signal.SIG_IGN:
                before[caught] = signal.signal(caught, signals.note)
        yield signals
    finally:
        for signum, handler in before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        os.close(reader)
        os.close(writer)
