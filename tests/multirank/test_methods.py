"""Memory-saving methods change no numbers: every layout with them equals one device without them.

The tests compare loss, norm, every gradient and the parameters after 2 AdamW steps with clipping,
in float64, with recomputed blocks and chunked losses. They cover cells of the exactness matrix
(tests/support/multirank/matrix.py), and schedules of products and pipelines, which are not in the
matrix.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from gridformer.config import LayoutConfig, Task
from tests.support.marks import full_unless
from tests.support.multirank.exactness import TOLERANCE, compare
from tests.support.multirank.matrix import (
    CELLS,
    MODELS,
    SCHEMES,
    SETTINGS,
    Cell,
    n_of,
    refusal,
)
from tests.support.multirank.pool import WorkerPool

STEPS = 2
METHODS: dict[str, dict[str, Any]] = {
    "full": {"recompute": "full", "loss_chunk_tokens": 21},
    "selective": {"recompute": "selective", "loss_chunk_tokens": 50},
}
POSSIBLE = [cell for cell in CELLS if n_of(cell) <= 8 and not refusal(cell)]
# Of two equally useful cells, choose the one with dropout, whose masks must be made again.
SMALL = [cell for cell in POSSIBLE if n_of(cell) <= 4 and cell.pp <= 2]
TELLING = sorted(SMALL, key=lambda cell: (not cell.dropout, n_of(cell), cell))
# Each scheme, family, pipeline and replica mode occurs at least once.
MODES = ("none", "replicate", "zero1", "none", "none", "fsdp", "none")  # for each scheme
QUICK = {
    next(cell for cell in TELLING if (cell.model, cell.scheme, cell.replicas) == wanted)
    for wanted in zip(itertools.cycle(MODELS), SCHEMES, MODES)
}
QUICK |= {next(cell for cell in TELLING if cell.pp == 2)}
# Selective recomputation concerns dropout of probabilities, which no scheme changes.
CASES = [("full", cell) for cell in POSSIBLE] + [
    ("selective", cell) for cell in POSSIBLE if cell.dropout and n_of(cell) <= 4
]
SELECTIVE = {("BERT", "Optimus")}


def quick_case(case: tuple[str, Cell]) -> bool:
    method, cell = case
    if method == "full":
        return cell in QUICK
    return (cell.model, cell.scheme) in SELECTIVE and (cell.pp, cell.replicas) == (1, "none")


def check(
    pool: WorkerPool,
    layout: dict[str, Any],
    model: dict[str, Any],
    method: str,
    task: Task = "auto",
) -> None:
    settings = {**SETTINGS, **METHODS[method]}
    n = LayoutConfig(**layout).n_processes
    how = layout, model, settings, STEPS, False, task
    for rank, one in enumerate(pool.run(n, compare, *how)):
        wrong = {k: v for k, v in one.items() if not v <= TOLERANCE["float64"]}
        assert not wrong, f"rank {rank}: {wrong}"


@pytest.mark.parametrize(
    ("method", "cell"),
    full_unless(quick_case, sorted(CASES, key=lambda case: n_of(case[1])), unpack=True),
    ids=lambda value: value if isinstance(value, str) else value.title,
)
def test_equals_one_device_without(pool: WorkerPool, method: str, cell: Cell) -> None:
    check(pool, cell.layout, cell.config, method, cell.task)


GRID: dict[str, Any] = {"scheme": "optimus", "rows": 2, "cols": 2}
STRIP: dict[str, Any] = {"scheme": "optimus", "rows": 2, "cols": 1}
LINE: dict[str, Any] = {"scheme": "megatron", "cols": 2}
OTHERS: dict[str, dict[str, Any]] = {
    "broadcast": {**GRID, "schedule": "broadcast"},
    "pipelined": {**GRID, "schedule": "pipelined"},
    "pipelined, output stays": {**GRID, "schedule": "pipelined", "stationary": "output"},
    "gather, none kept": {**GRID, "schedule": "gather", "keep_gathered": "none"},
    "gather, all kept": {**GRID, "schedule": "gather", "keep_gathered": "all"},
    "gather, inputs stay": {**GRID, "schedule": "gather", "stationary": "input"},
    "sequence, none kept": {**LINE, "sequence_parallel": True, "keep_gathered": "none"},
    "gpipe": {**LINE, "pp": 2, "pipeline": "gpipe", "micro_batches": 4},
    "1f1b, kept weights": {**STRIP, "pp": 2, "micro_batches": 4, "keep_gathered": "weights"},
    "interleaved": {"pp": 2, "pipeline": "interleaved", "stages_per_rank": 2, "micro_batches": 4},
    "interleaved, cut": {
        **LINE,
        "pp": 2,
        "pipeline": "interleaved",
        "stages_per_rank": 2,
        "micro_batches": 4,
    },
    "fsdp, grid": {**STRIP, "dp": 2, "dp_mode": "fsdp", "micro_batches": 2},
    "zero1, pipeline": {"pp": 2, "dp": 2, "dp_mode": "zero1", "micro_batches": 4},
    "outside": {"scheme": "subgraph", "branches": 2, "attention": "outside"},
    "common, first": {
        "scheme": "subgraph",
        "branches": 2,
        "common": "first",
        "feed_forward": "common",
    },
    "outside, first": {
        "scheme": "subgraph",
        "branches": 2,
        "common": "first",
        "attention": "outside",
        "feed_forward": "common",
    },
}
QUICK_OTHERS = {
    ("pipelined", "GPT-2"),
    ("interleaved", "GPT-2"),
    ("outside, first", "BERT"),
}


@pytest.mark.parametrize(
    ("name", "model"),
    full_unless(
        lambda case: case in QUICK_OTHERS,
        [(name, model) for name in OTHERS for model in MODELS],
        unpack=True,
    ),
)
def test_schedules_equal_one_device_without(pool: WorkerPool, name: str, model: str) -> None:
    config = {
        "n_layers": 3,
        "max_seq_len": 12,
        "dropout": 0.1,
        "attention_dropout": 0.1,
        **MODELS[model],
    }
    check(pool, OTHERS[name], config, "full")


def test_quick_cells_are_many_enough() -> None:
    """Every family, scheme and replica mode occurs, and so do pipelines, with dropout."""
    families = [
        {model.get("family", "gpt2") for model in some}
        for some in ((MODELS[cell.model] for cell in QUICK), MODELS.values())
    ]
    assert families[0] == families[1]
    assert {cell.scheme for cell in QUICK} == {*SCHEMES}
    assert {cell.pp for cell in QUICK} == {1, 2}
    assert {cell.replicas for cell in QUICK} == {"none", "replicate", "zero1", "fsdp"}
    assert all(cell.dropout for cell in QUICK)
