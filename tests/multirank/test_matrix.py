"""Every combination trains exactly as one device: the exactness matrix.

Its cells are those of tests/support/multirank/matrix.py. The tests compare loss, norm, every
gradient and the parameters after 5 AdamW steps with clipping, in float64. `make test` runs cells in
which every pair of values occurs; `make test-all` runs all of them, and writes the table in
docs/results/exactness.md.
"""

import fcntl
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gridformer.config import LayoutConfig
from tests.support.marks import full_unless
from tests.support.multirank.exactness import TOLERANCE, compare, worst_of
from tests.support.multirank.matrix import (
    CELLS,
    EXPERTS,
    HEADS,
    PAIRED,
    QUICK,
    QUICK_ON_NCCL,
    QUICK_STEPS,
    SETTINGS,
    Cell,
    n_of,
    refusal,
    remember,
    write,
)
from tests.support.multirank.nccl_path import on_nccl
from tests.support.multirank.networks import compare as compare_network
from tests.support.multirank.pool import WorkerPool

STEPS = 5  # steps when the table is written


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Iterator[dict[Cell | str, float]]:
    """Collect each cell's largest relative difference, and write the table if asked to."""
    worst: dict[Cell | str, float] = {}
    yield worst
    path = request.config.getoption("--exactness-table")
    if path:
        how = (
            "Largest relative difference from one device: loss, gradient norm, every gradient, "
            f"every parameter after {STEPS} AdamW steps with clipping, in float64, of the cells "
            "without and with dropout (of activations and of attention probabilities). Written by "
            "tests/multirank/test_matrix.py, all of which `make test-all` runs, torch "
            f"{torch.__version__}, gloo, {platform.machine()}. Tied embeddings, padding, two "
            "losses (GPT-2, BERT), label smoothing (Transformer) and rows of several documents "
            "or pairs (GPT-2 and Transformer with dropout, Llama and T5 without) are in it; "
            "fine-tuned models have labels and spans without dropout, and with it choices (BERT, "
            "Llama, T5), or a number and spans (GPT-2); with pp > 1 there are as many "
            "micro-batches as stages, and stages are of unequal size. Optimus and Megatron 2-D are "
            "on a 2x2 grid where that takes at most 8 processes, else on 2x1; the other schemes "
            "are on 2: up to 16 processes in all. Rows over s divide each sequence; with "
            "stationary weights columns divide the batch without dropout, and sequences with it. "
            "Of the models with experts, the first has different ones on all devices of a scheme "
            "and on its replicas (`experts_over`), and the second has them sharded by the scheme. "
            "Replicas in two levels (`shard_over`) and sums in each micro-batch are tested on the "
            "cells of fsdp, over NCCL's path. The bias of the head for answers has a gradient that "
            "is zero in exact arithmetic, because softmax over tokens does not see it. Its "
            "differences are relative to 1e-6, and are the largest of the fine-tuned models. In "
            "float32 AdamW turns the rounding of such gradients into steps of full size: the "
            "biases of keys, those of the heads for answers and choices, and that of the last norm "
            "before a head for answers differ between layouts by up to 1.6 times the learning rate "
            "after a few steps. No loss depends on them, so leave them out when you compare "
            "checkpoints, or train with a larger `train.adam_eps`, as tests in float32 do (1e-4)."
        )
        refused = {cell: why for cell in CELLS if (why := refusal(cell))}
        # Test processes of pytest-xdist each add what they have found.
        with open(Path(tempfile.gettempdir()) / "gridformer-exactness.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            known = remember(Path(path).with_suffix(".json"), worst)
            cells = {cell: value for cell, value in known.items() if isinstance(cell, Cell)}
            others = {name: value for name, value in known.items() if isinstance(name, str)}
            write(Path(path), cells, refused, others, how)


@pytest.mark.parametrize(
    "cell",
    full_unless(lambda cell: cell in QUICK, sorted(CELLS, key=n_of)),
    ids=lambda cell: cell.title,
)
def test_equals_one_device(
    pool: WorkerPool, found: dict[Cell | str, float], cell: Cell, request: pytest.FixtureRequest
) -> None:
    why = refusal(cell)
    if why:
        assert ": use " in why, "a refusal says what to use instead"
        return
    steps = STEPS if request.config.getoption("--exactness-table") else QUICK_STEPS
    how = cell.layout, cell.config, SETTINGS, steps, cell.documents, cell.task
    found[cell] = worst_of(pool.run(n_of(cell), compare, *how))


@pytest.mark.parametrize(
    "cell",
    full_unless(
        lambda cell: cell in QUICK_ON_NCCL,
        [cell for cell in sorted(CELLS, key=n_of) if n_of(cell) > 1 and not refusal(cell)],
    ),
    ids=lambda cell: cell.title,
)
def test_equals_one_device_over_nccl(pool: WorkerPool, cell: Cell) -> None:
    """NCCL's path runs over gloo; see tests/support/multirank/nccl_path.py."""
    how = cell.layout, cell.config, SETTINGS, QUICK_STEPS, cell.documents, cell.task
    worst_of(pool.run(n_of(cell), on_nccl, compare, *how))


GATHERED = [cell for cell in CELLS if cell.replicas == "fsdp" and not refusal(cell)]


# Weights that stay gathered for a step, and replicas in two levels that sum in each micro-batch.
FSDP: dict[str, dict[str, Any]] = {
    "kept": {"reshard": "step"},
    "hybrid": {"dp": 4, "shard_over": 2, "gradient_sync": "micro_batch"},
}


@pytest.mark.parametrize("how", FSDP)
@pytest.mark.parametrize(
    "cell",
    full_unless(
        lambda cell: cell == Cell("GPT-2", "Megatron", 1, "fsdp", True), sorted(GATHERED, key=n_of)
    ),
    ids=lambda cell: cell.title,
)
def test_choices_of_fsdp_equal_one_device_over_nccl(pool: WorkerPool, cell: Cell, how: str) -> None:
    """tests/multirank/test_equal_one_device.py tests them over gloo."""
    layout = {"micro_batches": 2, **cell.layout, **FSDP[how]}
    case = layout, cell.config, SETTINGS, QUICK_STEPS, cell.documents, cell.task
    n = LayoutConfig(**layout).n_processes
    if n <= 16:
        worst_of(pool.run(n, on_nccl, compare, *case))


@pytest.mark.parametrize("order", ["zb_h1", "zbv"])
@pytest.mark.parametrize(
    "cell",
    [
        Cell("GPT-2", "single", 4, "none", True),
        Cell("GPT-2", "Optimus", 2, "none", True),
        Cell("Llama", "Megatron, sequence parallel", 2, "fsdp", False),
    ],
    ids=lambda cell: cell.title,
)
def test_zero_bubble_equals_one_device_over_nccl(pool: WorkerPool, cell: Cell, order: str) -> None:
    """tests/multirank/test_equal_one_device.py tests it over gloo."""
    k = 2 if order == "zbv" else 1
    layout = {"pipeline": order, "stages_per_rank": k, "micro_batches": 2 * cell.pp}
    layout, config = {**cell.layout, **layout}, {**cell.config, "n_layers": 2 * cell.pp}
    how = layout, config, SETTINGS, QUICK_STEPS, cell.documents, cell.task
    worst_of(pool.run(n_of(cell), on_nccl, compare, *how))


RESNEXT: dict[str, tuple[int, dict[str, Any]]] = {
    "data parallel on 4": (4, {"g": 1}),
    "D&SP, g=2 of 4": (4, {"g": 2}),
    "D&SP, g=4 of 4": (4, {"g": 4}),
    "D&SP-cSub, g=2 of 4": (4, {"g": 2, "common": "first"}),
}


@pytest.mark.parametrize("name", RESNEXT)
def test_a_resnext_equals_one_device(
    pool: WorkerPool, found: dict[Cell | str, float], name: str
) -> None:
    n, how = RESNEXT[name]
    worst = 0.0
    for one in pool.run(n, compare_network, "resnext", how, [12] * STEPS):
        one.pop("held")
        worst = max(worst, *one.values())
    assert worst < TOLERANCE["float64"]
    found[name] = worst


def test_quick_cells_over_nccl_show_every_value() -> None:
    for i in range(len(Cell._fields)):
        assert {cell[i] for cell in QUICK_ON_NCCL} >= {cell[i] for cell in PAIRED}


def test_quick_cells_show_every_two_values_together() -> None:
    assert len(QUICK) < 80
    for i, j in ((0, 1), (1, 2), (1, 3), (2, 3), (0, 4)):
        found = {(c[i], c[j]) for c in QUICK if c in PAIRED}
        assert found == {(c[i], c[j]) for c in PAIRED}
    assert {c.model for c in QUICK} >= {*HEADS, *EXPERTS}
