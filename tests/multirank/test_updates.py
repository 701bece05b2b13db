"""Layers updated one by one, also in the backward pass, and moments in the host's memory.

The reference is one device that updates after its backward pass, with the same clipping.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from gridformer.config import LayoutConfig, TrainConfig
from gridformer.models.blocks import Layer
from gridformer.parallel.data.zero import replica_part
from gridformer.record.tracker import Entry
from gridformer.train.step import Stepper
from gridformer.utils.batch import next_words
from tests.support.memory_log import MemoryLog
from tests.support.multirank.exactness import (
    IN_BACKWARD,
    batch_of,
    built,
    tiny,
)
from tests.support.multirank.layouts import Layout
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.runs import assert_same_run, plan_of, start_from
from tests.support.multirank.runs import train as run

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
