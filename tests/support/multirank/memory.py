"""Compares a run's estimated memory with what torch's allocator hands out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from benchmarks.memory.measure import measure_rank

from gridformer.config import LayoutConfig, RunConfig, Task, TrainConfig
from gridformer.memory import budget
from gridformer.memory.estimate import estimate_rank
from gridformer.memory.ranks import largest_ranks
from gridformer.memory.room import room_of_budget, upper_bound
from gridformer.parallel.validation import check_layout
from gridformer.utils.units import GIB
from tests.support.multirank.exactness import tiny
from tests.support.multirank.pool import WorkerPool

AGREE = 0.05
SETTINGS: dict[str, Any] = {
    "global_batch": 32,
    "loss_chunk_tokens": 32,
    "save_every": 0,
    "device": "cpu",  # where the processes measure, on a machine with GPUs, too
}


def a_run(
    layout: dict[str, Any], model: dict[str, Any], train: dict[str, Any], task: Task | None = None
) -> RunConfig:
    config = tiny(**model)
    # A run of fine-tuning learns one task: labels if its model has them, otherwise spans.
    default = "auto" if config.token_head else "classify" if config.n_labels else "answer"
    data = {"path": Path("none"), "seq_len": config.max_seq_len, "task": task or default}
    return RunConfig(
        model=config,
        data=data,  # type: ignore[arg-type]
        layout=LayoutConfig(**layout),
        train=TrainConfig(**{**SETTINGS, **train}),
    )


def measured(run: RunConfig) -> tuple[int, int]:
    """Return the measured bytes of one rank."""
    torch.set_num_threads(1)
    return measure_rank(run, n_steps=2)


def refused_below(run: RunConfig, n_bytes: int) -> bool:
    """Return whether a run is refused if each process may take a little less than so many bytes."""
    with patch.object(budget, "refusal", lambda *_: "refused"):  # it looks for settings that fit
        return budget.fit_problems(run, room=room_of_budget((n_bytes - 1) / GIB, "it")) != []


def agrees_of(
    pool: WorkerPool, run: RunConfig, measuring: Callable[..., tuple[int, int]], *args: Any
) -> int:
    """Check that one of five attempts agrees with the estimate, and return its measured bytes.

    On a busy machine tensors may be held longer by chance, but not every time.
    """
    check_layout(run)
    told = {rank: estimate_rank(run, rank).peak for rank in largest_ranks(run)}
    found = []
    for _ in range(5):
        got = dict(pool.run(run.layout.n_processes, measuring, run, *args))
        assert upper_bound(run) >= max(got.values())
        apart = {rank: abs(peak / got[rank] - 1) for rank, peak in told.items()}
        more = max(got.values()) / max(told.values()) - 1
        if max(*apart.values(), more) <= AGREE:
            return max(got.values())
        found.append(f"apart by {apart}, the fullest rank by {more}")
    pytest.fail("; ".join(found))
