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
    Measured with the demo's model, one process with 2 threads on 2 cores, batches of 4, both ways
    in turn: while 15 to 45 other processes wanted the cores a step took 7.6 s, and 1.3 s with
    threads that sleep (medians of 8 runs). The price is that they have to be woken: at real-time
    priority on that same machine, in the place of a quiet one, a step took 0.152 s instead of
    0.133 s (medians of 7 runs). What a user has set is left alone: OMP_WAIT_POLICY=active suits a
    machine that nobody else uses.
    """
    if "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
