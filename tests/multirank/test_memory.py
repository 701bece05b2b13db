"""A rank's estimated memory equals what torch's allocator then hands out to it.

The tests measure allocations as the allocator counts them, in real processes. They use the step
with the lowest peak, because gloo's threads may by chance hold tensors a moment longer than the
code that waits for their message.
"""

import gc
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gridformer.config import LayoutConfig, RunConfig, TrainConfig
from gridformer.exactness import IN_BACKWARD
from gridformer.models.blocks import Layer
from gridformer.parallel.auto.heuristics import decide
from gridformer.parallel.auto.products import Work
from gridformer.parallel.data.zero import replica_part
from gridformer.parallel.tensor import summa
from gridformer.parallel.tensor.summa import gathered_weights_scope
from gridformer.parallel.validation import check_layout
from gridformer.train.step import Stepper
from gridformer.utils.batch import next_words
from tests.support.marks import full_unless
from tests.support.memory_log import MemoryLog
from tests.support.multirank.exactness import batch_of, built, tiny
from tests.support.multirank.layouts import Layout
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
V_SHAPED = {"pipeline": "zbv", "stages_per_rank": 2}
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all of a block again": (OPTIMUS, {"recompute": "full"}),
    "attention again": ({}, {"recompute": "selective"}),
    "again, in shares": (MEGATRON, {"recompute": "full"}),
    "again, over stages": ({**OPTIMUS, "rows": 1, "pp": 2, "micro_batches": 4},
        {"recompute": "full"}),
    "zero bubble": ({**MEGATRON, "pp": 2, "micro_batches": 4, "pipeline": "zb_h1"}, {}),
    "V": ({**MEGATRON, "pp": 2, "micro_batches": 4, **V_SHAPED}, {}),
    "again, V": ({"pp": 2, "micro_batches": 4, **V_SHAPED},
        {"recompute": "full", "dtype": "bfloat16"}),
    "again, zero bubble": ({"pp": 2, "micro_batches": 4, "pipeline": "zb_h1"},
        {"recompute": "full", "dtype": "bfloat16"}),
    "again, fsdp": ({"dp": 2, "dp_mode": "fsdp"}, {"recompute": "full"}),
    "fsdp, gathered once": ({"dp": 2, "dp_mode": "fsdp", "reshard": "step"}, {}),
    "again, cSub": ({"scheme": "subgraph", "branches": 2, "common": "first"},
        {"recompute": "full"}),
    "updates in the backward pass": ({"dp": 2, "dp_mode": "zero1"},
        {"update": "in_backward", "clip_by": "layer"}),
    "Muon": (OPTIMUS, {"optimizer": "muon"}),
    "Muon, fsdp": ({"dp": 2, "dp_mode": "fsdp"}, {"optimizer": "muon"}),
    "moments in bfloat16": (MEGATRON, {"moments_dtype": "bfloat16"}),
    "bfloat16": (OPTIMUS, {"dtype": "bfloat16"}),
    "float16": (MEGATRON, {"dtype": "float16"}),
    "whole logits": (OPTIMUS, {"loss_chunk_tokens": 0}),
    "several micro-batches": ({**MEGATRON, "micro_batches": 4}, {}),
    "broadcast": ({**OPTIMUS, "schedule": "broadcast"}, {}),
    "pipelined": ({**OPTIMUS, "schedule": "pipelined"}, {}),
}  # fmt: skip


# The first step of a pipelined schedule makes buffers that the next ones have, too.
MORE = {*METHODS} - {"all of a block again", "updates in the backward pass", "pipelined"}


@pytest.mark.parametrize("name", full_unless(lambda name: name not in MORE, METHODS))
def test_estimated_is_measured_with_methods_that_save_memory(pool: WorkerPool, name: str) -> None:
    layout, train = METHODS[name]
    agrees(pool, a_run(layout, {"attention_dropout": 0.1}, train))


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


# --------------------------------------------------- memory

N_LAYERS = 6


@dataclass
class ZeroShard:
    """Bytes of gradients of layers' matrices, and the peak of all tensors.

    They are the bytes of one layer, the most at once, and those left after the step.
    """

    layer: int
    most: int
    after: int
    peak: int


def held(layout: Layout, train: dict[str, Any]) -> ZeroShard:
    config = tiny(n_layers=N_LAYERS, max_seq_len=4)
    model, axes, plan = built(layout, config)
    layers = [module for module in model.modules() if isinstance(module, Layer)]
    matrices = [[p for p in layer.parameters() if p.dim() > 1] for layer in layers]
    tracker = MemoryLog()

    def mark(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        tracker.mark([parameter.grad], "gradient")

    for parameter in (p for each in matrices for p in each):
        parameter.register_post_accumulate_grad_hook(mark)
    stepper = Stepper(model, TrainConfig(global_batch=8, **train), axes, plan)

    def step(number: int) -> None:
        batch = batch_of(number, config, 8)
        stepper(number, lambda rows: next_words(batch[rows]))

    step(0)  # creates the optimizer's state
    for parameter in model.parameters():
        parameter.grad = None
        part = replica_part(parameter)
        if part is not None:
            part.grad = None
    gc.collect()
    gc.disable()
    with tracker:
        step(1)
    gc.enable()
    one = sum(p.numel() * p.element_size() for p in matrices[0])
    after = sum(grad_bytes(p) for each in matrices for p in each)
    return ZeroShard(one, tracker.peak("gradient"), after, tracker.peak())


def grad_bytes(parameter: nn.Parameter) -> int:
    grads = [p.grad for p in (parameter, replica_part(parameter)) if p is not None]
    return sum(grad.numel() * grad.element_size() for grad in grads if isinstance(grad, Tensor))


WHO: dict[str, tuple[Layout, int]] = {  # and how many layers' gradients are alive at once
    "alone": ({}, 1),
    "two replicas": ({"dp": 2}, 1),
    "zero1": ({"dp": 2, "dp_mode": "zero1"}, 1),
    "fsdp": ({"dp": 2, "dp_mode": "fsdp"}, 1),
    "megatron": ({"scheme": "megatron", "cols": 2}, 1),
    "D&SP": ({"scheme": "subgraph", "branches": 2}, 1),
}


@pytest.mark.parametrize("who", full_unless(("fsdp", "D&SP").__contains__, WHO))
def test_one_layers_gradients_are_held_at_a_time(pool: WorkerPool, who: str) -> None:
    """One layer's gradients are alive at once, besides those in messages over replicas.

    A gradient that has been sent has no memory but that of its message. After the step none are
    left, and the peak of all tensors is lower by as many layers' gradients.
    """
    layout, n_held = WHO[who]
    n = LayoutConfig(**layout).n_processes
    plain = pool.run(n, held, layout, {"clip_by": "layer"})
    for one, other in zip(pool.run(n, held, layout, IN_BACKWARD), plain):
        assert one.most == n_held * one.layer
        assert one.after == 0
        if "dp_mode" not in layout:  # otherwise, only sums of parts are kept
            assert other.after == N_LAYERS * one.layer
            assert one.peak < other.peak - (N_LAYERS - 2) * one.layer


@pytest.mark.parametrize("who", ["alone", "two replicas"])
def test_micro_batches_hold_all_gradients(pool: WorkerPool, who: str) -> None:
    """Gradients are summed over micro-batches, as the run's notes say, and freed at the end."""
    layout = {**WHO[who][0], "micro_batches": 2}
    for one in pool.run(LayoutConfig(**layout).n_processes, held, layout, IN_BACKWARD):
        assert one.most == N_LAYERS * one.layer
        assert one.after == 0
