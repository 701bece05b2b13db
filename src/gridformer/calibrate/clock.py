"""How long one operation takes: by events on a GPU, by the host's clock on a CPU."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from gridformer.calibrate.operations import Run
from gridformer.utils.torch_private import keep_gpu_busy

Meet = Callable[[], None]  # returns when all processes have called it

_GROUPS = 5  # timed groups of calls on a GPU, of which the median counts
_MOST_CALLS = 40  # calls in a group: the driver queues about 1,000 kernels
_HOST_S = 60e-6  # more than the host needs to launch one call, autograd included
_CYCLES_PER_S = 1.9e9  # of a GPU's clock; only the order of magnitude matters
_PARTS = 3  # of a window on a CPU, of which the median counts


def gpu_seconds(run: Run, window_s: float) -> float:
    """Returns the seconds that a GPU needs for one call, without the time to launch it.

    Before each group of calls the GPU is made to wait until the host has launched them all, so that
    they follow each other on the GPU without gaps.

    Args:
        run: Launches the operation.
        window_s: For about this number of seconds it is repeated.
    """
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    first = _gpu_group(run, 2)
    calls = int(min(_MOST_CALLS, max(1, window_s / _GROUPS / max(first, 1e-7))))
    return statistics.median(_gpu_group(run, calls) for _ in range(_GROUPS))


def _gpu_group(run: Run, calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    keep_gpu_busy(int(calls * _HOST_S * _CYCLES_PER_S))
    start.record()
    for _ in range(calls):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def cpu_seconds(runs: Sequence[Run], window_s: float, meet: Meet) -> float:
    """Returns the seconds of one call while all processes make such calls at the same time.

    If more processes than cores compute, the operating system lets them take turns, which makes
    some calls much longer than others: what counts is how many calls end in a window of time.

    Args:
        runs: The operation, on tensors of its own in each of them. They take turns, and their
            results are kept until their next turn, so that caches hold none of them if they are
            many.
        window_s: For this number of seconds it is repeated.
        meet: A barrier of all processes.
    """
    kept: deque[object] = deque(maxlen=len(runs))
    turns = itertools.cycle(runs)
    for _ in range(1 + len(runs)):
        kept.append(next(turns)())
    meet()
    clock, found = time.perf_counter, []
    for _ in range(_PARTS):
        calls, start = 0, clock()
        until = start + window_s / _PARTS
        while True:
            kept.append(next(turns)())
            calls += 1
            now = clock()
            if now >= until:
                break
        found.append((now - start) / calls)
    return statistics.median(found)
