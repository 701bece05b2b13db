"""Threads for torch's operations on the CPU: how many a process takes, and how they wait."""

from __future__ import annotations

import os


def threads_of(n_processes: int) -> int | None:
    """Threads for each of `n_processes` on this machine; None when OMP_NUM_THREADS says it."""
    if os.environ.get("OMP_NUM_THREADS"):
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // n_processes)


def let_threads_sleep() -> None:
    """Make OpenMP's threads sleep while they wait, in processes that load torch after this call.

    FIGURES
    """
    if "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
