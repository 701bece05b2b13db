"""The threads of torch's CPU operations: their number and how they wait."""

from __future__ import annotations

import os

from gridformer.utils.hardware import n_cores


def threads_of(n_processes: int) -> int | None:
    """Returns the number of threads for each of `n_processes` on this machine.

    It is None if the user has set OMP_NUM_THREADS.
    """
    if os.environ.get("OMP_NUM_THREADS"):
        return None
    return max(1, n_cores() // n_processes)


def let_threads_sleep() -> None:
    """Makes OpenMP threads sleep while they wait, in processes that load torch after this call.

    By default they spin, and on a shared machine each spinning thread occupies a core that another
    process needs. This was measured with the demo's model, one process with 2 threads on 2 cores
    and batches of 4, alternating both settings: while 15 to 45 other processes competed for the
    cores, a step took 7.6 s with spinning and 1.3 s with sleeping threads (medians of 8 runs). The
    price is that sleeping threads must be woken: at real-time priority on the same machine, instead
    of an idle one, a step took 0.152 s instead of 0.133 s (medians of 7 runs). Settings of the user
    are kept: OMP_WAIT_POLICY=active suits a machine that nobody else uses.
    """
    if "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
