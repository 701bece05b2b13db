"""Estimates the memory of a rank before anything is allocated: runs its code on fake tensors.

One process plays one rank. Its tensors have shapes but no memory, and its process group has all
ranks but sends nothing; everything else runs as on the real rank. The estimate is therefore valid
for every scheme and setting, and for any number of ranks.

It covers the memory that torch's CPU kernels take and, in runs on GPUs, gridformer's own kernels
and the messages of NCCL.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from gridformer.checkpoint.block import written_here
from gridformer.checkpoint.checkpoint import shards_of
from gridformer.checkpoint.snapshot import bytes_of
from gridformer.comm import collectives, p2p
from gridformer.config import RunConfig
from gridformer.memory.breakdown import (
    MemoryBreakdown,
    Once,
    StepLog,
    breakdown_of,
    log_step,
)
from gridformer.memory.fake import fake_tensors, skip_middle_chunks
from gridformer.memory.once import ways_of
from gridformer.memory.room import on_gpu
from gridformer.mesh import groups
from gridformer.parallel import build_parallel
from gridformer.parallel.auto.decisions import Decisions, decide_run
from gridformer.parallel.axes import build_axes
from gridformer.parallel.data import gradients
from gridformer.trace.batch import rows_like
from gridformer.trace.device import gpu_kernels
from gridformer.trace.repeated_products import NotRepeatableError
from gridformer.train.forward_backward import Pipeline
from gridformer.train.step import Stepper
from gridformer.utils.beside import on_all_cores
from gridformer.utils.garbage import no_garbage_collection

DEVICE = torch.device("cpu")
_COLLECTIVES = "all_reduce", "all_to_all_single", "barrier", "broadcast", "reduce"

T = TypeVar("T")


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
    once: bool = True,
    timeline: bool = True,
) -> MemoryBreakdown:
    """Estimates the breakdown of one rank over one optimizer step.

    The calling process must not belong to a process group.

    Args:
        run: The checked run.
        rank: The rank.
        decisions: The result of `decide_run(run)`; None calls it.
        once: Whether what a step repeats runs once, where this gives the same result.
        timeline: Whether the breakdown has its timeline, which takes time to make.
    """
    # Decide before the step is shortened, because decisions depend on its length.
    decisions = decisions or decide_run(run)
    read = partial(breakdown_of, rank=rank, timeline=timeline)
    return read_log(run, rank, decisions, read, once)


def read_log(
    run: RunConfig,
    rank: int,
    decisions: Decisions,
    read: Callable[[StepLog], T],
    once: bool = True,
    before: Callable[[Stepper], object] | None = None,
) -> T:
    """Runs one optimizer step of a rank, and returns what its log shows.

    Args:
        run, rank, decisions, once: See `estimate_rank`.
        read: Reads the log. When it is called, nothing has been freed since the step.
        before: Is called before the step, and may raise an error of its own.
    """
    for way in (*ways_of(run, decisions), None) if once else (None,):
        try:
            return _log(run, rank, decisions, way, read, before)
        except NotRepeatableError:
            pass
    raise AssertionError("a complete step repeats nothing")


def _log(
    run: RunConfig,
    rank: int,
    decisions: Decisions,
    once: Once | None,
    read: Callable[[StepLog], T],
    before: Callable[[Stepper], object] | None,
) -> T:
    rows = run.train.global_batch // run.layout.dp
    run = fewer_micro_batches(run)
    layout, train = run.layout, run.train
    left_out = rows - train.global_batch // layout.dp
    gpu = as_on_gpu() if on_gpu(run) else nullcontext()
    with playing(rank, layout.n_processes), no_garbage_collection(), gpu:
        axes = build_axes(layout, DEVICE.type, decisions.block)
        with fake_tensors() as fake:
            model = build_parallel(
                run.model,
                layout,
                axes,
                train.seed,
                DEVICE,
                train.dtype,
                decisions.choices,
                filled=False,
            )
            skip_middle_chunks(model)
            stepper = Stepper(model, train, axes, layout)
            if isinstance(stepper.passes, Pipeline):
                stepper.passes.executor.has_loaded()  # the estimate is for a later step
            if before is not None:
                before(stepper)
            stepper.updates.allocate(0)

            def step() -> None:
                rest = rows_like(run, slice(0, left_out // axes.batch.size))
                stepper(0, partial(rows_like, run))
                del rest  # stands for the other micro-batches: a step reads all at its beginning

            host: list[Tensor] = []
            if train.offload == "optimizer" and on_gpu(run):
                host = [t for state in stepper.updates.state.values() for t in state.values()]
            found = log_step(stepper, step, host, once, fake.remembered)
            saved = 0
            if train.saves_meanwhile:
                shards = shards_of(model, stepper.updates)
                saved = bytes_of(written_here(shards, axes))
            return read(replace(found, saved=saved, saved_beside=not on_gpu(run)))


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Makes a step inside take the paths of a GPU and of NCCL, which need other memory."""
    with (
        patch.object(groups, "over_nccl", lambda _: True),
        patch.object(gradients, "norms_at_once", lambda _: True),
        gpu_kernels(DEVICE.type),
    ):
        yield


@contextmanager
def playing(rank: int, n_processes: int) -> Iterator[None]:
    """Makes this process one rank of a process group that sends nothing, inside the context.

    Messages are over as soon as they are started, without the work that torch has with each.

    Args:
        rank: The rank that it is.
        n_processes: The size of the group; 1 makes no group.
    """
    if n_processes == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # torch replaces it by one that prints the rank
    dist.init_process_group("fake", rank=rank, world_size=n_processes, store=FakeStore())
    try:
        with (
            patch.multiple(p2p, isend=_over, irecv=_over),
            patch.multiple(collectives, _all_gather=_over, _reduce_scatter=_over),
            ExitStack() as stack,
        ):
            for name in _COLLECTIVES:
                stack.enter_context(patch.object(dist, name, _over))
            yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def _over(*args: Any, **kwargs: Any) -> None:
    """Takes the place of a function of torch that returns None for a message that is over."""


def fewer_micro_batches(run: RunConfig) -> RunConfig:
    """Reduces a run's micro-batches to the number from which on a step only repeats itself.

    Their size, and how many are in flight at a time, stay the same.
    """
    layout = run.layout
    enough = {"gpipe": layout.micro_batches, "1f1b": layout.pp + 2, "interleaved": 3 * layout.pp}
    n = min(layout.micro_batches, enough[layout.pipeline_order] if layout.pp > 1 else 2)
    batch = run.train.global_batch // layout.micro_batches * n
    return run.model_copy(
        update={
            "layout": layout.model_copy(update={"micro_batches": n}),
            "train": run.train.model_copy(update={"global_batch": batch}),
        }
    )
