"""What a rank of a run will hold, before anything is allocated: its own code, run on fake tensors.

One process plays one rank. Its tensors have shapes and no memory, its process group has all the
ranks and sends nothing; all else is what the rank would do. So the answer holds whatever the scheme
and the settings, and for any number of ranks.

It is what torch's CPU kernels hold. On CUDA attention may differ: there a kernel takes a learned
bias of scores that on a CPU keeps the probabilities.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch import Tensor

from gridformer.config import RunConfig
from gridformer.memory.breakdown import MemoryBreakdown, take_breakdown
from gridformer.memory.fake import fake_tensors, skip_middle_chunks
from gridformer.parallel import build_parallel
from gridformer.parallel.auto.decisions import Decisions, decide_run
from gridformer.parallel.axes import build_axes
from gridformer.train.step import Stepper
from gridformer.utils.batch import Batch
from gridformer.utils.forkserver import warm_up
from gridformer.utils.hardware import n_cores

DEVICE = torch.device("cpu")
# What takes time to import, and only who estimates needs.
_FAKES = ("torch._subclasses.fake_tensor", "torch.testing._internal.distributed.fake_pg")


def estimate_ranks(
    run: RunConfig, ranks: Sequence[int], decisions: Decisions | None = None
) -> list[MemoryBreakdown]:
    """The breakdowns of some ranks of a checked run; several are taken at a time.

    decisions: what `decide_run` said of the run; it is asked if they are not given.
    """
    decisions = decisions or decide_run(run)
    if len(ranks) == 1:
        return [estimate_rank(run, ranks[0], decisions)]
    warm_up(__name__, *_FAKES)  # unless there is a server already from which processes are forked
    workers = min(len(ranks), n_cores())
    with ProcessPoolExecutor(workers, get_context("forkserver")) as pool:
        return [*pool.map(partial(estimate_rank, run, decisions=decisions), ranks)]


def estimate_rank(run: RunConfig, rank: int, decisions: Decisions | None = None) -> MemoryBreakdown:
    """The breakdown of one rank, over one optimizer step.

    Not in a process that belongs to a process group already.
    """
    # Before the step is made shorter: they look at its length.
    decisions = decisions or decide_run(run)
    rows = run.train.global_batch // run.layout.dp
    run = shortened(run)
    layout, train = run.layout, run.train
    left_out = rows - train.global_batch // layout.dp
    with playing(rank, layout.n_processes):
        axes = build_axes(layout, DEVICE.type, decisions.block)
        with fake_tensors():
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
            stepper.updates.allocate(0)

            def step() -> None:
                rest = rows_like(run, slice(0, left_out // axes.batch.size))
                stepper(0, partial(rows_like, run))
                del rest  # micro-batches are read at the step's beginning, all of them

            host: list[Tensor] = []
            if train.offload == "optimizer" and on_gpu(run):
                host = [t for state in stepper.updates.state.values() for t in state.values()]
            return take_breakdown(stepper, rank, step, host)


def on_gpu(run: RunConfig) -> bool:
    """Whether the run's tensors lie on GPUs, as far as can be told here."""
    if run.train.device == "auto":
        return torch.cuda.is_available()
    return run.train.device == "cuda"


@contextmanager
def playing(rank: int, n_processes: int) -> Iterator[None]:
    """Be one rank of a process group in which nothing is sent."""
    if n_processes == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # into which torch puts the rank's number
    dist.init_process_group("fake", rank=rank, world_size=n_processes, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def shortened(run: RunConfig) -> RunConfig:
    """A step of as many micro-batches as it takes until it repeats itself: they are as large, and
    as many are under way at a time."""
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


def rows_like(run: RunConfig, rows: slice) -> Batch:
    """A batch with the keys, shapes and types of the run's own, and no content."""
    n = rows.stop - rows.start

    def ids(*shape: int) -> Tensor:
        return torch.zeros(n, *shape, dtype=torch.int64)

    def real(*shape: int) -> Tensor:
        return torch.ones(n, *shape, dtype=torch.bool)

    model, s, source = run.model, run.seq_len, run.source_len
    batch = {"tokens": ids(s), "targets": ids(s)}
    if model.two_stacks:
        batch |= {"source": ids(source)}
        if run.task == "pairs":
            batch |= {"source_valid": real(source)}
    if model.family == "bert":
        batch |= {"segments": ids(s)}
        if model.sentence_pair and not model.n_labels:
            batch |= {"pair": ids()}
    if model.n_labels:
        batch |= {"valid": real(s), "at": ids(), "labels": ids()}
    return batch
