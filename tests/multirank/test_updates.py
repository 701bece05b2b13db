"""Layers updated one by one, also in the backward pass, and moments in the host's memory.

The reference is one device that updates after its backward pass, with the same clipping.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from gridformer.config import LayoutConfig, TrainConfig
from gridformer.models.blocks import Layer
from gridformer.parallel import build_parallel
from gridformer.parallel.data.zero import replica_part
from gridformer.record.tracker import Entry
from gridformer.train.step import Stepper
from gridformer.utils.batch import next_words
from tests.support.marks import full_unless
from tests.support.memory_log import MemoryLog
from tests.support.multirank.exactness import (
    CPU,
    IN_BACKWARD,
    assert_equal_one_device,
    axes_of,
    batch_of,
    tiny,
)
from tests.support.multirank.layouts import Layout
from tests.support.multirank.matrix import QUICK, SETTINGS, Cell, n_of
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.runs import assert_same_run, plan_of, start_from
from tests.support.multirank.runs import train as run

METHODS: dict[str, dict[str, Any]] = {
    "in_backward": IN_BACKWARD,
    "clip_by_layer": {"clip_by": "layer"},
    "in_backward, not clipped": {"update": "in_backward", "clip_norm": 0.0},
    "offload": {"offload": "optimizer"},
    "all": {**IN_BACKWARD, "offload": "optimizer", "recompute": "full", "loss_chunk_tokens": 21},
}


class Case(NamedTuple):
    """A method and a cell of the exactness matrix.

    Without a pipeline, dropout comes with two micro-batches.
    """

    method: str
    cell: Cell

    @property
    def layout(self) -> Layout:
        accumulates = self.cell.pp == 1 and self.cell.dropout
        return self.cell.layout | ({"micro_batches": 2} if accumulates else {})

    @property
    def title(self) -> str:
        return f"{self.method}-{self.cell.title}".replace(", ", "_").replace(" ", "_")


# Cells in which every pair of values occurs, with each method. `make test` runs the small ones with
# one method each, and a grid and a long pipeline, which have no small cells there.
GRID = Cell("GPT-2", "Optimus", 1, "none", True)
STAGES = Cell("GPT-2", "single", 4, "none", False)  # one of the stages has no layer
CELLS = sorted(QUICK | {GRID, STAGES}, key=lambda cell: (n_of(cell), cell))
CASES = [Case(method, cell) for cell in CELLS for method in METHODS]


def is_quick(case: Case) -> bool:
    if case.cell == GRID:
        return case.method == "in_backward"
    if case.cell == STAGES:
        return case.method == "in_backward"
    turn = [*METHODS][CELLS.index(case.cell) % len(METHODS)]
    return n_of(case.cell) <= 2 and case.method == turn


@pytest.mark.parametrize("case", full_unless(is_quick, CASES), ids=lambda case: case.title)
def test_equals_one_device(pool: WorkerPool, case: Case) -> None:
    """Compare loss, norm, and parameters after three steps, for any layout."""
    settings = {**SETTINGS, **METHODS[case.method]}
    assert_equal_one_device(pool, case.layout, case.cell.config, settings, case.cell.task)


ORDERS: list[Layout] = [
    {"pp": 2, "micro_batches": 4, "pipeline": "gpipe"},
    {"pp": 2, "micro_batches": 4, "pipeline": "1f1b"},
    {"pp": 2, "micro_batches": 4, "stages_per_rank": 2, "pipeline": "interleaved"},
]
PIPELINES = [
    {**order, **beside} for beside in ({}, {"dp": 2, "dp_mode": "zero1"}) for order in ORDERS
]


@pytest.mark.parametrize(
    "layout",
    full_unless(ORDERS.__contains__, PIPELINES),
    ids=lambda layout: str([*layout.values()]),
)
def test_every_order_of_a_pipeline(pool: WorkerPool, layout: Layout) -> None:
    """Each stage is updated in its own last backward pass."""
    model = {"n_layers": 3, "max_seq_len": 12, "dropout": 0.1}
    assert_equal_one_device(pool, layout, model, {**SETTINGS, **IN_BACKWARD})


FSDP: Layout = {"dp": 2, "dp_mode": "fsdp"}
OTHER: Layout = {"scheme": "megatron", "cols": 2}


@pytest.mark.parametrize("back", [False, True], ids=["from them", "to them"])
def test_a_run_resumes_with_or_without_these_methods(
    pool: WorkerPool, token_folder: Path, tmp_path: Path, back: bool
) -> None:
    """Move between layouts, from a checkpoint with moments in the host's memory, and back."""
    sides = [(FSDP, {**IN_BACKWARD, "offload": "optimizer"}), (OTHER, {"clip_by": "layer"})]
    before, after = sides[::-1] if back else sides
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    pool.run(2, run, plan_of(token_folder, whole, before[0], clip_norm=0.05, **before[1]))
    start_from(whole, moved)
    pool.run(2, run, plan_of(token_folder, moved, after[0], clip_norm=0.05, **after[1]))
    assert_same_run(whole, moved)


# --------------------------------------------------------------------------- memory

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
    torch.set_num_threads(1)
    plan, config = LayoutConfig(**layout), tiny(n_layers=N_LAYERS, max_seq_len=4)
    axes = axes_of(plan)
    model = build_parallel(config, plan, axes, 1, CPU)
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
    marked = [entry for entry in tracker.entries if entry.kind == "gradient"]
    one = sum(p.numel() * p.element_size() for p in matrices[0])
    after = sum(grad_bytes(p) for each in matrices for p in each)
    return ZeroShard(one, peak(marked), after, tracker.peak()[1])


def grad_bytes(parameter: nn.Parameter) -> int:
    grads = [p.grad for p in (parameter, replica_part(parameter)) if p is not None]
    return sum(grad.numel() * grad.element_size() for grad in grads if isinstance(grad, Tensor))


def peak(entries: list[Entry]) -> int:
    log = MemoryLog()
    log.entries = entries
    log.now = max(when for entry in entries for when in (entry.born, entry.died or 0))
    return log.peak()[1]


WHO: dict[str, tuple[Layout, int]] = {  # and how many layers' gradients are alive at once
    "alone": ({}, 1),
    "two replicas": ({"dp": 2}, 1),
    "zero1": ({"dp": 2, "dp_mode": "zero1"}, 1),
    "fsdp": ({"dp": 2, "dp_mode": "fsdp"}, 1),
    "megatron": ({"scheme": "megatron", "cols": 2}, 1),
    "D&SP": ({"scheme": "subgraph", "branches": 2}, 1),
}


@pytest.mark.parametrize("who", WHO)
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
