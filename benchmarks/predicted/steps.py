"""Measures training steps of a run: its real model and optimizer step, on random tokens."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gridformer.config import RunConfig
from gridformer.mesh.process_group import World, close_process_groups, init_process_groups
from gridformer.parallel import build_parallel
from gridformer.parallel.auto.decisions import decide_run
from gridformer.parallel.axes import build_axes
from gridformer.record.batch import rows_like
from gridformer.train.numerics import set_numerics
from gridformer.train.step import Stepper
from gridformer.utils.batch import Batch

_TEXTS = ("tokens", "targets", "source")  # what holds tokens in a batch


@dataclass
class Measured:
    """Seconds of steps on the slowest rank, and the peak bytes of a GPU (0 on a CPU)."""

    seconds: list[float]
    peak_bytes: float = 0.0

    @property
    def median(self) -> float:
        return median(self.seconds)

    @staticmethod
    def read(path: Path) -> list[Measured]:
        return [Measured(**one) for one in json.loads(path.read_text(encoding="utf-8"))]


def work(
    runs: list[RunConfig], n_steps: int, n_warmups: int, forward_only: bool, out: Path
) -> None:
    """The entrypoint of every process: measures the runs in turn. Rank 0 writes their results.

    Args:
        runs: Runs with the same number of processes.
        n_steps: Timed steps of each run.
        n_warmups: Untimed steps before those.
        forward_only: Whether forward passes of a batch are timed instead, as evaluation runs them.
        out: The JSON file to write.
    """
    set_numerics(runs[0].train)
    world = init_process_groups(runs[0].train.device, runs[0].layout.n_processes, 600.0)
    found = [asdict(measure(run, world, n_steps, n_warmups, forward_only)) for run in runs]
    if world.rank == 0:
        out.write_text(json.dumps(found), encoding="utf-8")
    close_process_groups()


def measure(
    run: RunConfig, world: World, n_steps: int, n_warmups: int, forward_only: bool = False
) -> Measured:
    """Measures one run in this process, which is one of its ranks; see `work`."""
    device, step = world.device, stepping(run, world, forward_only)
    for _ in range(n_warmups):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    gc.collect()
    # Steps follow each other as in training. One ends when it does on the slowest rank, whose clock
    # is that of all the others: they are processes of one machine.
    if world.size > 1:
        dist.barrier()
    ends = [time.perf_counter()]
    for _ in range(n_steps):
        step()  # it waits for the gradients of the step before, on a CPU of this one
        ends.append(time.perf_counter())
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    most = torch.tensor([*ends, peak], dtype=torch.float64, device=device)
    if world.size > 1:
        dist.all_reduce(most, dist.ReduceOp.MAX)
    *last, peak_bytes = most.tolist()
    return Measured([after - before for before, after in pairwise(last)], peak_bytes)


def stepping(run: RunConfig, world: World, forward_only: bool = False) -> Callable[[], object]:
    """Returns what runs one step of a run in this process, or one forward pass of its batch."""
    decisions = decide_run(run)
    axes = build_axes(run.layout, world.device.type, decisions.block)
    model = build_parallel(
        run.model, run.layout, axes, run.train.seed, world.device, run.train.dtype,
        decisions.choices,
    )  # fmt: skip
    stepper = Stepper(model, run.train, axes, run.layout)
    read, numbers = random_rows(run), count()
    if forward_only:
        return lambda: stepper.evaluate([read])
    return lambda: stepper.start_ahead(next(numbers), read)


def random_rows(run: RunConfig) -> Callable[[Any], Batch]:
    """Returns how batches of random tokens are read; equal rows get equal tokens on all ranks."""

    known: dict[str, Batch] = {}  # so that making a batch takes time in the first step only

    def read(rows: Any) -> Batch:
        if str(rows) not in known:
            known[str(rows)] = new(rows)
        return known[str(rows)]

    def new(rows: Any) -> Batch:
        batch = rows_like(run, rows)
        places = range(*rows.indices(run.train.global_batch)) if isinstance(rows, slice) else rows
        for key in _TEXTS:
            if key in batch:
                batch[key] = torch.stack([_tokens(run, int(row), batch[key]) for row in places])
        return batch

    return read


def _tokens(run: RunConfig, row: int, like: Tensor) -> Tensor:
    random = np.random.default_rng(row)
    return torch.from_numpy(random.integers(0, run.model.vocab_size, like.shape[1]))
