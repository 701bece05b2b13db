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

    FIGURES
    """
    if "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
