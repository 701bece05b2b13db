"""Estimates the memory of a rank before anything is allocated: reads the record of its step.

The record is made by the rank's own code on tensors without memory (gridformer.record.step). So
the estimate is valid for every scheme and setting, and for any number of ranks. It covers the
memory of torch's kernels, of gridformer's own, and of the messages of NCCL or gloo.
"""

from __future__ import annotations

from collections.abc import Sequence

from gridformer.config import RunConfig
from gridformer.memory.breakdown import MemoryBreakdown, breakdown_of
from gridformer.memory.room import on_gpu
from gridformer.parallel.auto.decisions import Decisions, decide_run
from gridformer.record.device import Backend
from gridformer.record.rank import Extent, RecordOptions, record_ranks
from gridformer.utils.process import on_all_cores


def estimate_ranks(
    run: RunConfig, ranks: Sequence[int], decisions: Decisions | None = None
) -> list[MemoryBreakdown]:
    """Estimates the breakdowns of some ranks of a checked run, on all cores where that is possible.

    Args:
        run: The checked run.
        ranks: The ranks.
        decisions: The result of `decide_run(run)`; None calls it.
    """
    decisions = decisions or decide_run(run)

    def estimated(some: Sequence[int]) -> list[MemoryBreakdown]:
        return [estimate_rank(run, rank, decisions) for rank in some]

    return on_all_cores(estimated, ranks)


def estimate_rank(
    run: RunConfig,
    rank: int,
    decisions: Decisions | None = None,
    complete: bool = False,
    timeline: bool = True,
) -> MemoryBreakdown:
    """Estimates the breakdown of one rank over one optimizer step.

    It registers a device type in this process, which must not belong to a process group.

    Args:
        run: The checked run.
        rank: The rank.
        decisions: The result of `decide_run(run)`; None calls it.
        complete: Whether the step runs as a whole; otherwise it is composed from short ones.
        timeline: Whether the breakdown has its timeline, which takes time to make.
    """
    gpu = on_gpu(run)
    backend: Backend = "nccl" if gpu else "gloo"
    extent: Extent = "complete" if complete else "composed"
    how = RecordOptions(backend, storages=True, extent=extent)
    [record] = record_ranks(run, [[rank]], decisions or decide_run(run), how)
    return breakdown_of(record, not gpu, timeline)
