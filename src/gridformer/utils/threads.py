"""Threads for torch's operations on the CPU: how many a process takes, and how they wait."""

from __future__ import annotations

import os

from gridformer.utils.hardware import n_cores


def threads_of(n_processes: int) -> int | None:
    """Threads for each of `n_processes` on this machine; None when OMP_NUM_THREADS says it."""
    if os.environ.get("OMP_NUM_THREADS"):
        return None
    return max(1, n_cores() // n_processes)


def let_threads_sleep() -> None:
    """Make OpenMP's threads sleep while they wait, in processes that load torch after this call.

    By default they spin, and on a machine that others use each takes the core that another needs.
    The demo's model on one process with 2 threads and 2 cores, batches of 4, alternating: beside
    about 20 other busy processes a step takes 8.3 s with threads that spin and 1.4 s with threads
    that sleep (medians of 5 and 4 runs); with the cores to itself 131 and 152 ms (medians of 3).
    Who has the cores for themselves sets OMP_WAIT_POLICY=active: what is set is left alone.
    """
    if "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
