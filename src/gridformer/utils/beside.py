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
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from signal import ITIMER_PROF, SIGKILL, SIGPROF, setitimer
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
        # Results are in memory, not in a pipe, which the copy could not fill before it is read.
        self.memory = os.memfd_create("result")
        self.reader, writer = os.pipe()  # ends with the copy
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.reader)
            _compute(function, self.memory)
        os.close(writer)
        atexit.register(self.stop)

    def result(self) -> T:
        """Returns its result, or computes it in this process if the copy failed.

        Raises:
            TimeoutError: The copy has used up its processor time.
        """
        with open(self.reader, "rb") as stream:
            stream.read()
        code = self.wait()
        with open(self.memory, "rb") as memory:
            if code == -SIGPROF:
                raise TimeoutError
            if code:
                return self.instead()
            memory.seek(0)
            found: T = pickle.load(memory)  # written by a copy of this process
        return found

    def wait(self) -> int:
        """Waits for its end, and returns its exit code."""
        atexit.unregister(self.stop)
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:  # somebody else has waited for it
            return 1

    def stop(self) -> None:
        """Ends it, because nobody will ask for its result."""
        for end in (self.reader, self.memory):
            with suppress(OSError):
                os.close(end)
        with suppress(ProcessLookupError):
            os.kill(self.pid, SIGKILL)
        self.wait()


def _compute(function: Callable[[], T], memory: int) -> None:
    """Writes what a function returns and ends this process, with code 1 if the function fails."""
    global _is_copy
    _is_copy = True
    try:
        with open(memory, "wb") as stream:
            pickle.dump(function(), stream, pickle.HIGHEST_PROTOCOL)
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


def processor_s() -> float:
    """Returns the processor time of this process and of its copies that have ended, in seconds."""
    return sum(os.times()[:4])


def as_far_as(work: Sequence[Callable[[], T]], seconds: float) -> list[T | None]:
    """Does some work in copies of this process, as many as cores, which begin in turn with pieces.

    A copy remembers what its earlier pieces have loaded and found.

    Args:
        work: The pieces, which begin in this order; fewer than fill a pipe (32,768). `can_copy()`
            is true.
        seconds: The processor time of all copies together, after which they are stopped.

    Returns:
        The results, in the order of the pieces; None for those that were not done. Pieces that fail
        are done again in this process, which raises their errors.
    """
    found: list[T | None] = [None] * len(work)
    n = min(n_cores(), len(work))
    if not n or seconds <= 0:
        return found
    left, writer = os.pipe()  # the numbers of the pieces that no copy has begun
    os.write(writer, b"".join(number.to_bytes(2) for number in range(len(work))))
    os.close(writer)
    files = [os.memfd_create("results") for _ in range(n)]

    def pieces(file: int) -> None:
        setitimer(ITIMER_PROF, 0.0 if seconds == math.inf else seconds / n)  # ends the copy
        with open(file, "wb") as stream:
            while taken := os.read(left, 2):
                number = int.from_bytes(taken)
                try:
                    pickle.dump((number, True, work[number]()), stream)
                except Exception:  # whatever it is, this process finds the same
                    pickle.dump((number, False, None), stream)
                stream.flush()

    copies = [_Child(partial(pieces, file), lambda: None) for file in files]
    for copy, file in zip(copies, files):
        with suppress(TimeoutError):
            copy.result()
        with open(file, "rb") as stream, suppress(EOFError, pickle.UnpicklingError):
            stream.seek(0)
            while True:
                number, done, result = pickle.load(stream)  # written by a copy of this process
                found[number] = result if done else work[number]()
    os.close(left)
    return found


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
