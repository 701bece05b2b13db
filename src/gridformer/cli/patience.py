"""A limit on how long a command computes, for sizes with which it would take hours in silence."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Final

import typer

from gridformer.utils.errors import UserError

SECONDS: Final = 25.0
LONGEST: Final = 1e7
_LOOKS_S: Final = 0.5

Seconds = Annotated[
    float | None,
    typer.Option(
        "--seconds",
        min=0.0,
        max=LONGEST,
        help="Give up after this number of seconds of the processor's time, by default 25; 0 means "
        "never.",
    ),
]


class TooLongError(UserError):
    """A command that computed for longer than it was allowed to."""


@contextlib.contextmanager
def time_limit(seconds: float | None, instead: str) -> Iterator[None]:
    """Ends the block with an error once it has taken that much of the processor's time.

    Time in which other programs have the processor does not count, so a busy machine changes
    nothing.

    Args:
        seconds: The limit; 0 means none, and None SECONDS.
        instead: What takes less time, as a part of a sentence.

    Raises:
        TooLongError: The block took too long.
    """
    seconds = SECONDS if seconds is None else seconds
    if not seconds or threading.current_thread() is not threading.main_thread():
        yield
        return

    began = _busiest()

    def look(number: int, frame: FrameType | None) -> None:
        if _busiest() - began < seconds:
            return
        for child in multiprocessing.active_children():
            child.kill()  # a pool that is left waits for them
        raise TooLongError(
            f"this takes more than {seconds:g} seconds of the processor's time: {instead}, or "
            "allow more with --seconds, such as --seconds 600"
        )

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _LOOKS_S, _LOOKS_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _busiest() -> float:
    """Returns the seconds of the processor's time of this process, or of a child with more."""
    most = time.process_time()
    children = {child.pid for child in multiprocessing.active_children()}
    with contextlib.suppress(OSError):  # systems without /proc
        for task in Path("/proc/self/task").iterdir():
            children |= {int(pid) for pid in (task / "children").read_text().split()}
    for pid in children:
        with contextlib.suppress(OSError):
            after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            user, system = map(int, after_name[11:13])
            most = max(most, (user + system) / os.sysconf("SC_CLK_TCK"))
    return most
