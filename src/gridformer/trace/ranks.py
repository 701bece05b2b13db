"""Traces many ranks, in a few processes at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch

from gridformer.config import RunConfig
from gridformer.parallel.auto.decisions import Decisions, decide_run
from gridformer.trace.device import Backend
from gridformer.trace.events import Trace
from gridformer.trace.rank import RecordOptions, record_ranks, trace_rank
from gridformer.utils.beside import can_copy, on_all_cores
from gridformer.utils.forkserver import warm_up
from gridformer.utils.garbage import no_garbage_collection
from gridformer.utils.hardware import n_cores

_START_S = 6.0  # seconds of work that is left, above which processes are started
WARM = "gridformer.trace.warm"  # imports slow modules


def trace_ranks(
    run: RunConfig,
    lines: Sequence[Sequence[int]],
    decisions: Decisions | None = None,
    repeat: bool = False,
    limit_s: float = float("inf"),
    kernels: bool = False,
    backend: Backend = "nccl",
    here: bool = False,
) -> list[Trace]:
    """Traces an optimizer step of some ranks of a checked run.

    Each process takes seconds to load torch, and then traces many ranks.

    Args:
        run: The checked run.
        lines: The ranks. The ranks of one list differ only in their place along pp, and their
            stages have equal layers; see `gridformer.trace.rank`.
        decisions: The result of `decide_run(run)`; None calls it.
        repeat: Whether equal micro-batches of a pipeline are traced once and repeated.
        limit_s: No list is begun after this many seconds.
        kernels, backend: See `trace_rank`.
        here: Whether this process may trace, too, which registers a device type in it. Then copies
            of it share the work. If it cannot be copied, other processes are started for work that
            takes longer than starting them.

    Returns:
        The traces by rank. Ranks that were not begun in time are left out.
    """
    until = time.monotonic() + limit_s
    decisions = decisions or decide_run(run)
    trace = partial(_trace_in_time, run, decisions, repeat, until, kernels, backend)
    if here and can_copy():
        done = on_all_cores(partial(_trace_all, trace), lines)
    else:
        done = _trace_here(trace, lines) if here else []
    found = [trace for traces in done for trace in traces]
    lines = lines[len(done) :]
    if not lines:
        return sorted(found, key=lambda trace: trace.rank)
    warm_up(WARM)  # has no effect if a fork server is already running
    workers = min(len(lines), n_cores())
    with ProcessPoolExecutor(workers, get_context("forkserver"), _one_thread) as pool:
        found += [trace for traces in pool.map(trace, lines) for trace in traces]
    return sorted(found, key=lambda trace: trace.rank)


def _trace_all(
    trace: Callable[[Sequence[int]], list[Trace]], lines: Sequence[Sequence[int]]
) -> list[list[Trace]]:
    with no_garbage_collection():
        return [trace(line) for line in lines]


def _trace_here(
    trace: Callable[[Sequence[int]], list[Trace]], lines: Sequence[Sequence[int]]
) -> list[list[Trace]]:
    """Traces lists of ranks in this process until the others would take too long.

    The first list does not count: it takes longer, because it loads modules that others use.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found: list[list[Trace]] = []
    began = 0.0
    try:
        with no_garbage_collection():
            for line in lines:
                n = len(found)
                spent = time.process_time() - began
                if n > 1 and spent / (n - 1) * (len(lines) - n) > _START_S:
                    break
                found.append(trace(line))
                began = began or time.process_time()
    finally:
        torch.set_num_threads(threads)
    return found


def _trace_in_time(
    run: RunConfig,
    decisions: Decisions,
    repeat: bool,
    until: float,
    kernels: bool,
    backend: Backend,
    ranks: Sequence[int],
) -> list[Trace]:
    if time.monotonic() > until:  # the clock is the same in all processes of a machine
        return []
    if len(ranks) > 1:
        how = RecordOptions(backend, kernels, all_layers=True)
        return [one.trace for one in record_ranks(run, [ranks], decisions, how)]
    return [trace_rank(run, ranks[0], decisions, repeat, kernels, backend)]


def _one_thread() -> None:
    torch.set_num_threads(1)
