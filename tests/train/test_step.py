"""The step's own arithmetic: the rows that a device reads, gradient norms, and divergence."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gridformer.config import LayoutConfig, ModelConfig, TrainConfig
from gridformer.mesh import Axes, Axis
from gridformer.models import Model
from gridformer.parallel import build_parallel
from gridformer.parallel.data.gradients import counted_square
from gridformer.train.step import Stepper
from gridformer.utils.batch import Batch, next_words
from gridformer.utils.errors import DivergedError

MODEL = ModelConfig(n_layers=1, hidden_size=8, n_heads=2, vocab_size=11, max_seq_len=4)
CPU = torch.device("cpu")


def stepper(axes: Axes | None = None, micro_batches: int = 1, **train: Any) -> Stepper:
    model = build_parallel(MODEL, LayoutConfig(), Axes(), 1, CPU)
    layout = LayoutConfig(micro_batches=micro_batches)
    return Stepper(model, TrainConfig(**train), axes or Axes(), layout)


def test_the_norm_of_a_large_gradient_is_accurate() -> None:
    """A naive float32 sum is off by 4e-4 at this size, so it depends on the layout."""
    parameter = torch.nn.Parameter(torch.empty(1600, 6400))
    parameter.grad = torch.rand(1600, 6400, generator=torch.Generator().manual_seed(1))
    model = torch.nn.Module()
    model.weight = parameter
    want = float(parameter.grad.double().square().sum())
    assert float(counted_square(model.parameters(), Axes())) == pytest.approx(want, rel=1e-6)


@settings(max_examples=40)
@given(
    dp=st.integers(1, 4), rows=st.integers(1, 4), micro=st.integers(1, 4), each=st.integers(1, 3)
)
def test_every_row_is_read_once(dp: int, rows: int, micro: int, each: int) -> None:
    batch = dp * rows * micro * each
    read: list[int] = []
    for replica in range(dp):
        for part in range(micro):
            for row in range(rows):
                axes = Axes(dp=Axis("dp", dp, replica), batch=Axis("batch", rows, row))
                device = stepper(axes, global_batch=batch, micro_batches=micro)
                read += range(batch)[device.split.rows(part)]
                mine = device.split.all_rows.reshape(micro, each)
                assert mine[part].tolist() == [*range(batch)[device.split.rows(part)]]
    assert read == list(range(batch)), "and in order"


def test_a_step_reads_once_and_counts_once() -> None:
    """What a step does besides its passes does not grow with the number of micro-batches."""
    tokens = torch.randint(0, 11, (8, 5))
    read: list[list[int]] = []
    counted: list[int] = []
    counts = Model.counts

    def read_rows(rows: Any) -> Batch:
        read.append(rows.tolist())
        return next_words(tokens[rows])

    def count(batch: Batch) -> dict[str, torch.Tensor]:
        counted.append(len(batch["targets"]))
        return counts(batch)

    losses = []
    for micro in (1, 4):
        device = stepper(global_batch=8, micro_batches=micro)
        with patch.object(Model, "counts", staticmethod(count)):
            losses.append(device(0, read_rows).loss)
    assert read == [[*range(8)]] * 2
    assert counted == [8, 8]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_diverged_step_changes_nothing(poison: float) -> None:
    device = stepper(global_batch=2)
    tokens = torch.randint(0, 11, (2, 5))
    device(0, lambda rows: next_words(tokens[rows]))
    with torch.no_grad():
        device.model.get_parameter("norm.weight")[3] = poison
    before = [p.clone() for p in device.model.parameters()]
    with pytest.raises(DivergedError, match=r"step 2: .*Lower train\.lr"):
        device(1, lambda rows: next_words(tokens[rows]))
    for a, b in zip(before, device.model.parameters()):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def test_each_step_has_masks_of_its_own() -> None:
    """With the same weights and batch, each step drops its own elements, reproducibly."""
    tokens = torch.randint(0, 11, (2, 5))

    def loss_at(step: int, dropout: float) -> float:
        config = MODEL.model_copy(update={"dropout": dropout})
        model = build_parallel(config, LayoutConfig(), Axes(), 1, CPU)
        stepper = Stepper(model, TrainConfig(global_batch=2), Axes())
        with torch.no_grad():  # larger weights, so that dropped elements show in the loss
            model.get_parameter("tokens.weight").mul_(20)
        return stepper(step, lambda rows: next_words(tokens[rows])).loss

    assert loss_at(0, 0.5) == loss_at(0, 0.5)
    assert len({loss_at(step, 0.5) for step in range(4)}) == 4
    assert len({loss_at(step, 0.0) for step in range(4)}) == 1


def test_no_model_outlives_its_stepper() -> None:
    """Not even until the garbage collector runs, for a GPU may have no room for two."""
    batch = next_words(torch.zeros(2, 5, dtype=torch.long))

    def some_steps() -> list[weakref.ref[Any]]:
        run = stepper(global_batch=2, dtype="float16")
        run.start_ahead(0, lambda rows: {name: x[rows] for name, x in batch.items()})
        run.start(1, lambda rows: {name: x[rows] for name, x in batch.items()})
        model = run.model
        return [weakref.ref(model), *map(weakref.ref, model.parameters())]

    gc.disable()
    try:
        assert not any(ref() is not None for ref in some_steps())
    finally:
        gc.enable()
