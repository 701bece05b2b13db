"""Runs work in forked copies of this process at the same time, on other cores.

A copy of a process that has loaded torch starts in some milliseconds, a new one in seconds. But a
copy has only one thread, and locks that other threads held stay locked in it. So nothing is copied
while other threads run Python, except for the one that draws a line of progress, which holds no
lock that a computation needs. In the copy of a process that has computed gradients torch raises an
error, because its threads for these are missing; then the process itself does the work.
"""

from __future__ import annotations

import atexit
import math
import os
import pickle
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from signal import SIGKILL
from typing import Generic, TypeVar

from gridformer.utils.hardware import n_cores

T = TypeVar("T")
R = TypeVar("R")

_is_copy = False


class _Child(Generic[T]):
    """A copy of this process, which computes something.

    Args:
        function: The function that it runs.
        instead: The function that this process runs if the copy fails; None means the same one.
    """

    def __init__(self, function: Callable[[], T], instead: Callable[[], T] | None = None) -> None:
        self.instead = instead or function
        sys.stdout.flush()
        sys.stderr.flush()
        self.reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.reader)
            _compute(function, writer)
        os.close(writer)
        atexit.register(self.stop)

    def result(self) -> T:
        """Returns its result, or computes it in this process if the copy failed."""
        with open(self.reader, "rb") as stream:
            text = stream.read()
        self.wait()
        if not text:
            return self.instead()
        found: T = pickle.loads(text)  # written by a copy of this process
        return found

    def wait(self) -> None:
        """Waits for its end."""
        atexit.unregister(self.stop)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def stop(self) -> None:
        """Ends it, because nobody will ask for its result."""
        with suppress(OSError):
            os.close(self.reader)
        with suppress(ProcessLookupError):
            os.kill(self.pid, SIGKILL)
        self.wait()


def _compute(function: Callable[[], T], writer: int) -> None:
    """Writes what a function returns, or nothing if it fails, and ends this process."""
    global _is_copy
    _is_copy = True
    try:
        text = pickle.dumps(function())
        with open(writer, "wb") as stream:
            stream.write(text)
    except BaseException:  # the other process will find the same, and say so
        os._exit(1)
    os._exit(0)


def is_copy() -> bool:
    """Whether this process is a copy, which ends when its work is done."""
    return _is_copy


def can_copy() -> bool:
    """Whether work can be done beside this process."""
    here = threading.current_thread()
    others = [one for one in threading.enumerate() if one is not here]
    alone = all(type(one).__module__ == "rich.live" for one in others)
    return alone and not _is_copy and sys.platform == "linux" and n_cores() > 1


def beside(function: Callable[[], T]) -> Callable[[], T]:
    """Begins to compute something in a copy of this process.

    Args:
        function: The function to run, whose result can be pickled.

    Returns:
        A function that waits for the result and returns it. Where this process cannot be copied,
        the function computes the result.
    """
    if not can_copy():
        return function
    return _Child(function).result


def as_far_as(work: Sequence[Callable[[], T]], seconds: float, fewest: int = 0) -> list[T | None]:
    """Does some work at the same time, each piece of it in a copy of this process.

    Args:
        work: The pieces; `can_copy()` is true.
        seconds: Pieces that are not done after this time are stopped.
        fewest: This number of pieces is waited for, however long they take.

    Returns:
        The results, in the order of the pieces; None for those that were stopped.
    """
    end = time.monotonic() + seconds
    found: list[T | None] = [None] * len(work)
    waiting = {child.reader: (n, child) for n, child in enumerate(map(_Child, work))}
    while waiting:
        left = max(0.0, end - time.monotonic())
        must = len(work) - len(waiting) < fewest or left == math.inf
        ready, _, _ = select.select([*waiting], [], [], None if must else left)
        if not ready:
            break
        for reader in ready:
            n, child = waiting.pop(reader)
            found[n] = child.result()
    for _, child in waiting.values():
        child.stop()
    return found


def shared(work: Sequence[Callable[[], T]]) -> list[T]:
    """Does some work in copies of this process, one on each core.

    Each copy begins with the next piece of the work when it is done with one, so all of them end at
    about the same time if the longest pieces come first.

    Args:
        work: The pieces, whose results can be pickled; fewer than fill a pipe (32,768).

    Returns:
        The results, in the order of the pieces. Pieces that fail are done again in this process,
        which raises their errors.
    """
    return _in_copies(work, n_cores(), helps=False)()


def started(
    work: Sequence[Callable[[], T]], then: Sequence[Callable[[], R]] = ()
) -> tuple[Callable[[], list[T]], Callable[[], list[R]]]:
    """Begins some work in copies of this process, one on each core but that of this process.

    Args:
        work: See `shared`.
        then: Other work that copies begin when all of this is done.

    Returns:
        A function for each kind of work. It does the pieces that no copy has begun, waits for the
        others, and returns the same results as `shared`.
    """
    n, held = n_cores() - 1, os.pipe()
    first = _in_copies(work, n, helps=True)
    os.close(held[1])  # so only the copies hold it, until they end
    second = _in_copies(then, n, helps=True, after=held[0])
    os.close(held[0])
    return first, second


def _in_copies(
    work: Sequence[Callable[[], T]], n: int, helps: bool, after: int | None = None
) -> Callable[[], list[T]]:
    """Begins some work in n copies of this process; the function that it returns waits for results.

    Args:
        work: The pieces.
        n: The number of copies.
        helps: Whether this process does pieces itself when it is asked for the results.
        after: A pipe that ends when the copies may begin.
    """
    if not can_copy() or not work:
        return lambda: [piece() for piece in work]
    left, writer = os.pipe()
    os.write(writer, b"".join(n.to_bytes(2) for n in range(len(work))))
    os.close(writer)

    def some(after: int | None = None) -> dict[int, T]:
        if after is not None:
            os.read(after, 1)
        found = {}
        while taken := os.read(left, 2):
            n = int.from_bytes(taken)
            found[n] = work[n]()
        return found

    copies = [_Child[dict[int, T]](partial(some, after), dict) for _ in range(min(n, len(work)))]
    if not helps:
        os.close(left)

    def results() -> list[T]:
        done: dict[int, T] = {}
        if helps:
            done |= some()
            os.close(left)
        for copy in copies:
            done |= copy.result()
        return [done[n] if n in done else piece() for n, piece in enumerate(work)]

    return results


def on_all_cores(function: Callable[[Sequence[T]], list[R]], work: Sequence[T]) -> list[R]:
    """Does some work, divided among this process and copies of it, one on each other core.

    Args:
        function: Does some of the work, and returns a result for each piece of it.
        work: The pieces.

    Returns:
        The results, in the order of the pieces.
    """
    n = max(1, min(n_cores(), len(work))) if can_copy() else 1
    others = [beside(partial(function, work[start::n])) for start in range(1, n)]
    found: list[R | None] = [None] * len(work)
    found[::n] = function(work[::n])
    for start, share in enumerate(others, 1):
        found[start::n] = share()
    return [one for one in found if one is not None]
