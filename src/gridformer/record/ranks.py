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
from gridformer.record.events import Trace
from gridformer.record.rank import RecordOptions, record_ranks, trace_rank
from gridformer.utils.fork_pool import on_all_cores
from gridformer.utils.forkserver import warm_up
from gridformer.utils.hardware import n_cores
from gridformer.utils.process import no_garbage_collection

WARM = "gridformer.record.warm"  # imports slow modules


def trace_ranks(
    run: RunConfig,
    lines: Sequence[Sequence[int]],
    decisions: Decisions | None = None,
    repeat: bool = False,
    limit_s: float = float("inf"),
    here: bool = False,
) -> list[Trace]:
    """Traces an optimizer step of some ranks of a checked run, as it would run on GPUs over NCCL.

    Args:
        run: The checked run.
        lines: The ranks; see `gridformer.record.rank.record_ranks`.
        decisions: The result of `decide_run(run)`; None calls it.
        repeat: Whether equal micro-batches of a pipeline are traced once and repeated.
        limit_s: No list is begun after this many seconds.
        here: Whether this process may trace, too, which registers a device type in it. Then copies
            of it share the work. Otherwise processes are started, which load torch for seconds.

    Returns:
        The traces by rank. Ranks that were not begun in time are left out.
    """
    until = time.monotonic() + limit_s
    trace = partial(_trace_in_time, run, decisions or decide_run(run), repeat, until)
    if here:
        done = on_all_cores(partial(_trace_all, trace), lines)
    else:
        warm_up(WARM)  # has no effect if a fork server is already running
        workers = min(len(lines), n_cores())
        with ProcessPoolExecutor(workers, get_context("forkserver"), _one_thread) as pool:
            done = [*pool.map(trace, lines)]
    return sorted((trace for traces in done for trace in traces), key=lambda trace: trace.rank)


def _trace_all(
    trace: Callable[[Sequence[int]], list[Trace]], lines: Sequence[Sequence[int]]
) -> list[list[Trace]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with no_garbage_collection():
            return [trace(line) for line in lines]
    finally:
        torch.set_num_threads(threads)


def _trace_in_time(
    run: RunConfig, decisions: Decisions, repeat: bool, until: float, ranks: Sequence[int]
) -> list[Trace]:
    if time.monotonic() > until:  # the clock is the same in all processes of a machine
        return []
    if repeat or len(ranks) > 1:
        records = record_ranks(run, [ranks], decisions, RecordOptions(all_layers=True))
        return [one.trace for one in records]
    return [trace_rank(run, ranks[0], decisions)]


def _one_thread() -> None:
    torch.set_num_threads(1)
