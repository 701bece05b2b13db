"""This process: its streams, threads and allocator, its cores and memory, and copies of it.

A forked copy has only one thread, and locks that other threads held stay locked in it; so nothing
is copied while other threads run Python, except for the one that draws a line of progress. The
pools of `concurrent.futures` would give up all work if one copy is ended at its time limit.
"""

from __future__ import annotations

import atexit
import gc
import io
import math
import multiprocessing
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from signal import ITIMER_PROF, SIGKILL, setitimer
from typing import Generic, TextIO, TypeVar

T = TypeVar("T")
R = TypeVar("R")

# Since torch 2.9 the first name holds for all kinds of GPUs, and the others are still read.
ALLOC_CONF = "PYTORCH_ALLOC_CONF"
_ALLOC_CONFS = (ALLOC_CONF, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_is_command = _is_last_work = _is_copy = False


def running() -> str:
    """Returns `2.1 processes were running` if programs used the processor, else an empty text.

    It is the mean of the last minute, so ask before this process computes anything.
    """
    load = os.getloadavg()[0]
    return f"{load:.1f} processes were running" if load > 0.5 else ""


def n_cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_memory() -> int | None:
    """Returns the free bytes of the machine or its container, the lesser; None if unknown."""
    free = []
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free.append(int(line.split()[1]) * 1024)
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        free.append(limit - int((group / "memory.current").read_text()))
    return min(free, default=None)


def use_expandable_segments() -> None:
    """Makes the CUDA allocator grow its segments, unless the user has set it up differently.

    Otherwise memory between tensors of other sizes stays unused. Only Linux has the setting.
    """
    if sys.platform == "linux" and not any(name in os.environ for name in _ALLOC_CONFS):
        os.environ[ALLOC_CONF] = "expandable_segments:True"


def let_threads_sleep() -> None:
    """Makes OpenMP threads sleep while they wait, in processes that load torch after this call.

    By default they spin, and occupy cores that other processes need: with the demo's model, 2
    threads on 2 cores and 15 to 45 competing processes a step took 7.6 s with spinning and 1.3 s
    with sleeping threads; on an idle machine 0.133 s and 0.152 s. Settings of the user are kept.
    """
    if "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def never_fail_to_print() -> None:
    """Prints `?` for what the terminal's encoding lacks, and nothing to streams that are closed."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def leave_progress_bar(stream: TextIO | None = None) -> None:
    """Clears the terminal's line and shows its cursor, which a killed progress bar has hidden."""
    stream = stream or sys.stdout
    if stream.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        print("\r\x1b[2K\x1b[?25h", end="", flush=True, file=stream)


def end_with_parent() -> None:
    """Ends this process of multiprocessing once its parent has ended, even if that was killed.

    A thread waits for that, so it works whatever the main thread does.
    """

    def wait() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, name="parent watch", daemon=True).start()


@contextmanager
def no_garbage_collection(ends: bool = False) -> Iterator[None]:
    """Turns off the cyclic garbage collector, which searches millions of objects of torch.

    If the process `ends` after the context, the objects of its end are not searched later, either.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if ends:
            gc.freeze()
        if was_enabled:
            gc.enable()


def begin_command() -> None:
    """Notes that this process does nothing but run a command."""
    global _is_command
    _is_command = True


@contextmanager
def last_work() -> Iterator[None]:
    """Surrounds the work of a command that starts no training, after which its process ends."""
    global _is_last_work
    with no_garbage_collection(ends=True):
        _is_last_work = _is_command
        try:
            yield
        finally:
            _is_last_work = False


def ends_with_its_work() -> bool:
    """Whether this process ends after its present work, so nobody needs its modules as they are."""
    return _is_last_work or is_copy()


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
