"""Runs work in forked copies of this process, on other cores.

A copy has only one thread, and locks that other threads held stay locked in it; so nothing is
copied while other threads run Python, except for the one that draws a line of progress. The pools
of `concurrent.futures` would give up all work if one copy is ended at its time limit.
"""

from __future__ import annotations

import atexit
import math
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from signal import ITIMER_PROF, SIGKILL, setitimer
from typing import Generic, TypeVar

from gridformer.utils.hardware import n_cores

T = TypeVar("T")
R = TypeVar("R")

_is_copy = False


class _Copy(Generic[R]):
    """A copy of this process, which does numbered pieces of work, for some processor time."""

    def __init__(
        self, work: Iterable[tuple[int, Callable[[], R]]], seconds: float = math.inf
    ) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        # Results are in memory, not in a pipe, which the copy could not fill before it is read.
        self._memory = os.memfd_create("results")
        self._pid = os.fork()
        if self._pid == 0:
            _compute(work, self._memory, seconds)
        atexit.register(self._stop)

    def results(self) -> dict[int, tuple[bool, R]]:
        """Waits for its end. Returns, by number, whether each piece succeeded, and its result."""
        atexit.unregister(self._stop)
        with suppress(ChildProcessError):  # somebody else has waited for it
            os.waitpid(self._pid, 0)
        results = {}
        with open(self._memory, "rb") as stream, suppress(EOFError, pickle.UnpicklingError):
            stream.seek(0)
            while True:
                number, *result = pickle.load(stream)  # written by a copy of this process
                results[number] = tuple(result)
        return results

    def _stop(self) -> None:
        """Ends it, because nobody will ask for its results."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, SIGKILL)
        self.results()


def _compute(work: Iterable[tuple[int, Callable[[], object]]], memory: int, seconds: float) -> None:
    """Writes the results of some work, and ends this process."""
    global _is_copy
    _is_copy = True
    try:
        setitimer(ITIMER_PROF, 0.0 if seconds == math.inf else seconds)  # ends this process
        with open(memory, "wb") as stream:
            for number, piece in work:
                try:
                    result = pickle.dumps((number, True, piece()), pickle.HIGHEST_PROTOCOL)
                except Exception:  # the other process will find the same, and say so
                    result = pickle.dumps((number, False, None))
                stream.write(result)
                stream.flush()
    finally:
        os._exit(0)


def is_copy() -> bool:
    """Whether this process is a copy, which ends when its work is done."""
    return _is_copy


def can_copy() -> bool:
    """Whether copies of this process can work beside it."""
    here = threading.current_thread()
    others = [thread for thread in threading.enumerate() if thread is not here]
    alone = all(type(thread).__module__ == "rich.live" for thread in others)
    return alone and not _is_copy and sys.platform == "linux" and n_cores() > 1


def processor_s() -> float:
    """Returns the processor time of this process and of its copies that have ended, in seconds."""
    return sum(os.times()[:4])


def as_far_as(work: Sequence[Callable[[], R]], seconds: float) -> list[R | None]:
    """Does pieces of work in copies of this process, one on each core; `can_copy()` must be true.

    Args:
        work: The pieces, which begin in this order; fewer than fill a pipe (32,768).
        seconds: The processor time of all copies together, after which they are stopped.

    Returns:
        The results, in the order of the pieces; None for those that were not done. Pieces that fail
        are done again in this process, which raises their errors.
    """
    results: list[R | None] = [None] * len(work)
    n = min(n_cores(), len(work))
    if not n or seconds <= 0:
        return results
    left, writer = os.pipe()  # the numbers of the pieces that no copy has begun
    os.write(writer, b"".join(number.to_bytes(2) for number in range(len(work))))
    os.close(writer)

    def pieces() -> Iterator[tuple[int, Callable[[], R]]]:
        while taken := os.read(left, 2):
            number = int.from_bytes(taken)
            yield number, work[number]

    copies = [_Copy(pieces(), seconds / n) for _ in range(n)]
    os.close(left)
    for copy in copies:
        for number, (done, result) in copy.results().items():
            results[number] = result if done else work[number]()
    return results


def on_all_cores(function: Callable[[Sequence[T]], list[R]], work: Sequence[T]) -> list[R]:
    """Divides work among this process and copies of it, one on each other core.

    Args:
        function: Does some pieces of the work, and returns a result for each.
        work: The pieces, in whose order the results are returned.
    """
    n = max(1, min(n_cores(), len(work))) if can_copy() else 1
    copies = [_Copy([(i, partial(function, work[i::n]))]) for i in range(1, n)]
    shares = [function(work[::n])]
    for i, copy in enumerate(copies, 1):
        done, share = copy.results().get(i, (False, []))
        shares.append(share if done else function(work[i::n]))
    return [shares[i % n][i // n] for i in range(len(work))]
