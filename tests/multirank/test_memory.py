"""What is estimated of a rank's memory is what torch's allocator then hands out to it.

Measured are allocations as the allocator counts them, in real processes. Of several steps the one
with the lowest peak counts: threads of gloo hold tensors a moment longer than those who wait for
their message, by chance.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gridformer.config import LayoutConfig, RunConfig, TrainConfig
from gridformer.memory.budget import at_most
from gridformer.memory.estimate import estimate_rank
from gridformer.memory.measure import measure_rank
from gridformer.memory.ranks import largest_ranks
from gridformer.parallel.validation import check
from tests.support.marks import full_unless
from tests.support.multirank.exactness import tiny
from tests.support.multirank.matrix import CELLS, Cell, quick
from tests.support.multirank.pool import WorkerPool

AGREE = 0.05
SETTINGS: dict[str, Any] = {"global_batch": 32, "loss_chunk_tokens": 32}


def a_run(layout: dict[str, Any], model: dict[str, Any], train: dict[str, Any]) -> RunConfig:
    config = tiny(**model)
    return RunConfig(
        model=config,
        data={"path": Path("none"), "seq_len": config.max_seq_len},  # type: ignore[arg-type]
        layout=LayoutConfig(**layout),
        train=TrainConfig(**{**SETTINGS, **train}),
    )


def measured(run: RunConfig) -> tuple[int, int]:
    """On one rank."""
    torch.set_num_threads(1)
    return measure_rank(run, n_steps=2)


def agrees(pool: WorkerPool, run: RunConfig) -> None:
    agrees_of(pool, run, measured)


def agrees_of(
    pool: WorkerPool, run: RunConfig, measuring: Callable[..., tuple[int, int]], *args: Any
) -> None:
    """Held longer by chance, on a busy machine, is not each time: of five one must agree."""
    check(run)
    told = {rank: estimate_rank(run, rank).peak for rank in largest_ranks(run)}
    found = []
    for _ in range(5):
        got = dict(pool.run(run.layout.n_processes, measuring, run, *args))
        assert at_most(run) >= max(got.values())
        apart = {rank: abs(peak / got[rank] - 1) for rank, peak in told.items()}
        more = max(got.values()) / max(told.values()) - 1
        if max(*apart.values(), more) <= AGREE:
            return
        found.append(f"apart by {apart}, the fullest rank by {more}")
    pytest.fail("; ".join(found))


# Of the matrix's cells a small one for each scheme and for each mode of replicas.
SMALL = sorted(quick(), key=lambda cell: (LayoutConfig(**cell.layout).n_processes, cell))
ONE_STACK = [cell for cell in SMALL if cell.model in ("GPT-2", "BERT")]
QUICK = {*{c.scheme: c for c in reversed(ONE_STACK)}.values()}
QUICK |= {*{c.replicas: c for c in reversed(ONE_STACK) if c.scheme != "single"}.values()}
QUICK |= {*{c.model: c for c in reversed(SMALL)}.values()}


def possible(cell: Cell) -> bool:
    """Some combinations cannot be; tests/multirank/test_matrix.py asserts what is said of them."""
    try:
        check(a_run(cell.layout, cell.config, {}))
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    "cell", full_unless(lambda cell: cell in QUICK, CELLS), ids=lambda cell: cell.title
)
def test_estimated_is_measured(pool: WorkerPool, cell: Cell) -> None:
    agrees(pool, a_run(cell.layout, cell.config, {}))


OPTIMUS = {"scheme": "optimus", "rows": 2, "cols": 2}
MEGATRON = {"scheme": "megatron", "cols": 2, "dp": 2}
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all of a block again": (OPTIMUS, {"recompute": "full"}),
    "attention again": ({}, {"recompute": "selective"}),
    "again, in shares": (MEGATRON, {"recompute": "full"}),
    "again, over stages": (
        {**OPTIMUS, "rows": 1, "pp": 2, "micro_batches": 4},
        {"recompute": "full"},
    ),
    "again, fsdp": ({"dp": 2, "dp_mode": "fsdp"}, {"recompute": "full"}),
    "again, cSub": (
        {"scheme": "subgraph", "branches": 2, "common": "first"},
        {"recompute": "full"},
    ),
    "updates in the backward pass": (
        {"dp": 2, "dp_mode": "zero1"},
        {"update": "in_backward", "clip_by": "layer"},
    ),
    "bfloat16": (OPTIMUS, {"dtype": "bfloat16"}),
    "float16": (MEGATRON, {"dtype": "float16"}),
    "whole logits": (OPTIMUS, {"loss_chunk_tokens": 0}),
    "several micro-batches": ({**MEGATRON, "micro_batches": 4}, {}),
    "broadcast": ({**OPTIMUS, "schedule": "broadcast"}, {}),
    "pipelined": ({**OPTIMUS, "schedule": "pipelined"}, {}),
}


MORE = {*METHODS} - {"all of a block again", "again, in shares", "updates in the backward pass"}


@pytest.mark.parametrize("name", full_unless(lambda name: name not in MORE, METHODS))
def test_estimated_is_measured_with_methods_that_save_memory(pool: WorkerPool, name: str) -> None:
    layout, train = METHODS[name]
    agrees(pool, a_run(layout, {"attention_dropout": 0.1}, train))
