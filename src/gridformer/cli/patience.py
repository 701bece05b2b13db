"""A limit on how long a command computes, for sizes with which it would take hours in silence."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Final

import typer

from gridformer.utils.errors import UserError

SECONDS: Final = 25.0
LONGEST: Final = 1e7
_LOOKS_S: Final = 0.5
_SOON_S: Final = 0.003
# So long torch may take to return, and then the block to end before the error is raised again.
_UNWINDS_S: Final = 3.0

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

    The error may be raised at any point, and others may see it first: torch logs what passes
    through its operators, or makes another error of it, and Python prints what is raised in the
    callback of a weak reference, and goes on. Nothing of that reaches the user, and the block
    fails nevertheless.

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

    began, raise_by, is_over = _used(), 0.0, False
    error = TooLongError(
        f"this takes more than {seconds:g} seconds of the processor's time: {instead}, or "
        "allow more with --seconds, such as --seconds 600"
    )

    def look(number: int, frame: FrameType | None) -> None:
        nonlocal is_over, raise_by
        if not raise_by and _busiest(began) < seconds:
            return
        raise_by = raise_by or time.monotonic() + _UNWINDS_S
        if _within_torch(frame) and time.monotonic() < raise_by:
            signal.setitimer(signal.ITIMER_REAL, _SOON_S, _SOON_S)
            return
        is_over = True
        for child in multiprocessing.active_children():
            if child.pid not in began:  # the block has started it, and a pool that is left waits
                child.kill()
        logging.disable(logging.CRITICAL)
        warnings.simplefilter("ignore")
        # Once more only after a while: an error within the unwinding of C++ aborts the process.
        signal.setitimer(signal.ITIMER_REAL, _UNWINDS_S, _UNWINDS_S)
        raise error

    def unraisable(what: sys.UnraisableHookArgs) -> None:
        if what.exc_value is not error:
            hook(what)
        elif is_over:
            signal.setitimer(signal.ITIMER_REAL, _SOON_S, _UNWINDS_S)

    hook, sys.unraisablehook = sys.unraisablehook, unraisable
    disabled = logging.root.manager.disable
    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _LOOKS_S, _LOOKS_S)
    try:
        with warnings.catch_warnings():
            yield
    except Exception:
        if not is_over:
            raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = hook
        logging.disable(disabled)
    if is_over:
        raise error from None


def _within_torch(frame: FrameType | None) -> bool:
    """Whether an error at this point would pass through code of torch that expects none.

    That is so within operators, which Python runs for fake tensors: torch's modes would be left in
    a state in which C++ aborts the process. And it is so where C++ calls functions of torch.
    """
    innermost = ""
    while frame is not None:
        if frame.f_code.co_name == "__torch_dispatch__":
            return True
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if not innermost and package in ("torch", "gridformer"):
            innermost = package
        frame = frame.f_back
    return innermost == "torch"


def _used() -> dict[int, float]:
    """Returns the seconds of the processor's time of this process and of each of its children."""
    found = {os.getpid(): time.process_time()}
    children = {child.pid for child in multiprocessing.active_children()}
    with contextlib.suppress(OSError):  # systems without /proc
        for task in Path("/proc/self/task").iterdir():
            children |= {int(pid) for pid in (task / "children").read_text().split()}
    for pid in children:
        with contextlib.suppress(OSError):
            after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            user, system = map(int, after_name[11:13])
            found[pid or 0] = (user + system) / os.sysconf("SC_CLK_TCK")
    return found


def _busiest(began: dict[int, float]) -> float:
    """Returns the seconds that this process, or a child with more, has taken since it began."""
    return max(seconds - began.get(pid, 0.0) for pid, seconds in _used().items())
