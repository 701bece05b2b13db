"""A rank's estimated memory equals what torch's allocator then hands out to it.

The tests measure allocations as the allocator counts them, in real processes. They use the step
with the lowest peak, because gloo's threads may by chance hold tensors a moment longer than the
code that waits for their message.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from benchmarks.memory.measure import measure_rank
from torch import Tensor

from gridformer.config import LayoutConfig, RunConfig
from gridformer.memory.estimate import estimate_rank
from gridformer.parallel.auto.heuristics import decide
from gridformer.parallel.auto.products import Work
from gridformer.parallel.tensor import summa
from gridformer.parallel.tensor.summa import gathered_weights_scope
from gridformer.parallel.validation import check_layout
from tests.support.marks import full_unless
from tests.support.multirank.exactness import batch_of, built, tiny
from tests.support.multirank.matrix import CELLS, QUICK, Cell
from tests.support.multirank.memory import a_run, agrees_of, measured, refused_below
from tests.support.multirank.pool import WorkerPool


def agrees(pool: WorkerPool, run: RunConfig) -> None:
    """The estimate is right, and no run is said to fit into less than it was seen to take."""
    seen = agrees_of(pool, run, measured)
    assert refused_below(run, seen)


# A small cell of the matrix for each scheme that shares activations in a way of its own.
SMALL = sorted(QUICK, key=lambda cell: (LayoutConfig(**cell.layout).n_processes, cell))
ONE_STACK = [cell for cell in SMALL if cell.model in ("GPT-2", "BERT")]
FEW = ("Megatron, sequence parallel", "Optimus", "D&SP-cSub", "Megatron 2-D")
OF_EACH_SCHEME = {c for c in {c.scheme: c for c in reversed(ONE_STACK)}.values() if c.scheme in FEW}


def possible(cell: Cell) -> bool:
    """Reject invalid combinations, whose messages tests/multirank/test_matrix.py checks."""
    try:
        check_layout(a_run(cell.layout, cell.config, {}, cell.task))
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    "cell", full_unless(lambda cell: cell in OF_EACH_SCHEME, CELLS), ids=lambda cell: cell.title
)
def test_estimated_is_measured(pool: WorkerPool, cell: Cell) -> None:
    agrees(pool, a_run(cell.layout, cell.config, {}, cell.task))


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
    "fsdp, gathered once": ({"dp": 2, "dp_mode": "fsdp", "reshard": "step"}, {}),
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


# The first step of a pipelined schedule makes buffers that the next ones have, too.
MORE = {*METHODS} - {"all of a block again", "updates in the backward pass", "pipelined"}


@pytest.mark.parametrize("name", full_unless(lambda name: name not in MORE, METHODS))
def test_estimated_is_measured_with_methods_that_save_memory(pool: WorkerPool, name: str) -> None:
    layout, train = METHODS[name]
    agrees(pool, a_run(layout, {"attention_dropout": 0.1}, train))


def measured_steps(run: RunConfig) -> list[int]:
    """Return the measured bytes of one rank in each of several steps."""
    torch.set_num_threads(1)
    return [measure_rank(run, n_steps=1)[1] for _ in range(6)]


def test_what_threads_of_gloo_free_is_not_taken_for_held(pool: WorkerPool) -> None:
    """The profiler does not see it, so measured steps seemed to hold all that these had freed."""
    run = a_run({"scheme": "megatron", "cols": 4}, {"n_layers": 4}, {"recompute": "full"})
    told = estimate_rank(run, 0).peak
    steps = [peak for peaks in pool.run(4, measured_steps, run) for peak in peaks]
    right = [peak for peak in steps if peak <= 1.01 * told]
    assert len(right) > 0.85 * len(steps), steps


# --------------------------------------------------- what a layer keeps for backward

B = 12
CONFIG = tiny()
BSH = B * CONFIG.max_seq_len * CONFIG.hidden_size
LAYER = ("qkv", "out", "up", "down")

Kept = tuple[float, float]


def kept(layout: dict[str, Any], n_layers: int) -> Kept:
    """Return the elements of tensors that autograd holds: activations, and gathered weights.

    Activations are recognized by their size.
    """
    model, axes, _ = built(layout, tiny(n_layers=n_layers))
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in parameters and tensor.dim() >= 2 and tensor.shape[-1] > 1:
            held[place] = tensor
        return tensor

    part = batch_of(0, CONFIG, B).chunk(axes.row.size)[axes.row.index]
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with gathered_weights_scope(model), hooks:
        loss = model.loss_sum(part[:, :-1], part[:, 1:])
        cells = {c for m in model.modules() if (c := vars(m).get("gathered_weight")) is not None}
        weights = sum(_elements(whole) for cell in cells for whole in _wholes(cell))
    assert loss.requires_grad
    return sum(map(_elements, held.values())), weights


def _wholes(cell: summa.GatheredWeight) -> list[Tensor]:
    operands = cell._operands.values()
    return [operand.whole.wait() for operand in operands if operand.whole is not None]


def _elements(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def one_layer(layout: dict[str, Any]) -> Kept:
    three, one = kept(layout, 3), kept(layout, 1)
    return (three[0] - one[0]) / 2, (three[1] - one[1]) / 2


def optimus(rows: int, cols: int, keep: str = "none", **how: str) -> dict[str, Any]:
    fixed = {"schedule": "gather", "keep_gathered": keep}
    return {"scheme": "optimus", "rows": rows, "cols": cols, **fixed, **how}


SEQUENCE = {"scheme": "megatron", "cols": 4, "sequence_parallel": True}

# In units of bsh, on one device. The 16 are: the inputs of both norms (x), their results, q, k, v,
# the attention's result, and twice the feed-forward's width (before and after the GELU).
SHARES: dict[str, tuple[dict[str, Any], Fraction]] = {
    "single": ({}, Fraction(16)),
    "megatron": ({"scheme": "megatron", "cols": 4}, 4 + Fraction(12, 4)),
    "sequence": ({**SEQUENCE, "keep_gathered": "none"}, Fraction(16, 4)),
    "sequence-inputs": ({**SEQUENCE, "keep_gathered": "inputs"}, 2 + Fraction(14, 4)),
    "gather-2x2": (optimus(2, 2), Fraction(16, 4)),
    "gather-2x3": (optimus(2, 3), Fraction(16, 6)),
    "gather-4x1": (optimus(4, 1), Fraction(16, 4)),
    "gather-2x2-inputs": (optimus(2, 2, "inputs"), Fraction(2, 2) + Fraction(14, 4)),
    "gather-2x3-inputs": (optimus(2, 3, "inputs"), Fraction(2, 2) + Fraction(14, 6)),
    "gather-2x3-weights": (optimus(2, 3, "weights"), Fraction(16, 6)),
    "gather-1x4-inputs": (optimus(1, 4, "inputs"), 2 + Fraction(14, 4)),
    # All four inputs travel, and the attention keeps its own result in addition.
    "gather-output-2x3": (optimus(2, 3, stationary="output"), Fraction(16, 6)),
    "gather-output-2x3-inputs": (
        optimus(2, 3, "inputs", stationary="output"),
        Fraction(7, 2) + Fraction(9, 6),
    ),
    "gather-input-2x3": (optimus(2, 3, "all", stationary="input"), Fraction(16, 6)),
    "broadcast-2x2": (optimus(2, 2, schedule="broadcast"), Fraction(16, 4)),
    "broadcast-2x3": (optimus(2, 3, "all", schedule="broadcast"), Fraction(16, 6)),
    "pipelined-2x3": (optimus(2, 3, schedule="pipelined"), Fraction(16, 6)),
}


# What another grid of the same kind shows, too.
REPEATED = {"gather-2x2", "gather-4x1", "gather-2x2-inputs", "broadcast-2x2", "gather-input-2x3"}


@pytest.mark.parametrize("name", full_unless(lambda name: name not in REPEATED, SHARES))
def test_kept_for_backward(pool: WorkerPool, name: str) -> None:
    """Statistics (one or two numbers per token and head) come on top of the table's terms."""
    layout, share = SHARES[name]
    plan = LayoutConfig(**layout)
    weights = 0.0
    if plan.keep_gathered in ("weights", "all") and plan.schedule == "gather":
        weights = 12 * CONFIG.hidden_size**2 / plan.cols
    for activations, held in pool.run(plan.n_processes, one_layer, layout):
        assert activations / BSH == pytest.approx(float(share), rel=0.06)
        assert activations >= share * BSH
        assert held == weights


@pytest.mark.parametrize(
    ("rows", "cols"),
    full_unless(lambda grid: grid == (2, 3), [(2, 2), (2, 3), (1, 4), (4, 1)], unpack=True),
    ids=lambda n: str(n),
)
@pytest.mark.parametrize("keep", ["inputs", "weights", "all"])
def test_kept_memory_equals_the_prediction(
    pool: WorkerPool, rows: int, cols: int, keep: str
) -> None:
    work = Work(tokens=B * CONFIG.max_seq_len)
    layout = optimus(rows, cols, keep)
    choices = decide(CONFIG, LayoutConfig(**layout), work)
    said = sum(choices.kept_bytes(choices[name]) for name in LAYER) / CONFIG.n_layers
    with_keep = pool.run(rows * cols, one_layer, layout)
    without = pool.run(rows * cols, one_layer, optimus(rows, cols))
    for (activations, weights), (before, none) in zip(with_keep, without):
        assert none == 0
        more = (activations - before + weights) * work.itemsize
        assert more == pytest.approx(said, rel=1e-6, abs=1)
