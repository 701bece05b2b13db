"""The step's own arithmetic: rows, norms, divergence; its time, and its peak of memory."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from gridformer.config import LayoutConfig, ModelConfig, TrainConfig
from gridformer.mesh import Axes, Axis
from gridformer.models import Model
from gridformer.parallel import build_parallel
from gridformer.parallel.data.gradients import counted_square
from gridformer.train import console, in_flight_steps
from gridformer.train.in_flight_steps import StartedStep
from gridformer.train.metrics import read_metrics
from gridformer.train.plan import Plan
from gridformer.train.step import Stepper
from gridformer.utils import tensors
from gridformer.utils.batch import Batch, next_words
from gridformer.utils.errors import DivergedError
from gridformer.utils.tensors import DeviceEvent
from gridformer.utils.units import GIB
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.runs import plan_of, train, train_a_step_ahead

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
        axes = [Axes(dp=Axis("dp", dp, replica), batch=Axis("batch", rows, i)) for i in range(rows)]
        devices = [stepper(one, global_batch=batch, micro_batches=micro) for one in axes]
        for part in range(micro):
            for device in devices:
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


def test_only_gpus_count_what_they_give(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, asked = torch.device("cuda", 1), []

    def most(device: torch.device) -> int:
        asked.append(device)
        return 7

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", most)
    assert in_flight_steps.peak_bytes(gpu) == 7
    assert in_flight_steps.peak_bytes(torch.device("cpu")) is None
    assert asked == [gpu]


def as_on_gpus(plan: Plan) -> str:
    """Train as if each rank's memory grew by a GiB a step, and return what is printed."""
    steps = itertools.count(1)
    out = io.StringIO()
    with (
        patch.object(
            in_flight_steps, "peak_bytes", lambda _: (10 * dist.get_rank() + next(steps)) * GIB
        ),
        patch.object(console, "_LINE_EVERY_S", -1.0),
        contextlib.redirect_stdout(out),
    ):
        train(plan)
    return out.getvalue()


@pytest.mark.parametrize("ahead", [False, True], ids=["", "a step ahead"])
def test_every_step_tells_the_largest_peak(
    pool: WorkerPool, token_folder: Path, tmp_path: Path, ahead: bool
) -> None:
    plan = plan_of(token_folder, tmp_path, {"dp": 2}, steps=3, eval_batches=1)
    how = (train_a_step_ahead, as_on_gpus) if ahead else (as_on_gpus,)
    printed, other = pool.run(2, *how, plan)
    lines = [line for line in read_metrics(tmp_path) if line["step"]]
    assert [line["peak_memory_gib"] for line in lines] == [11.0, 12.0, 13.0]
    for step, peak in ((1, 11), (2, 12), (3, 13)):
        (line,) = [line for line in printed.splitlines() if f"step     {step}/3" in line]
        assert f"peak {peak} GiB" in line, line
    assert "peak" not in other


def test_a_step_that_is_read_late_took_no_longer() -> None:
    """Every look at the clock is a second later."""
    step = StartedStep.__new__(StartedStep)
    with patch.object(tensors.time, "perf_counter", itertools.count().__next__):
        step.began, step.ended = DeviceEvent(CPU), DeviceEvent(CPU)
        for _ in range(5):
            tensors.time.perf_counter()
        assert step.seconds == 1.0


class Event:
    """A CUDA event of a device that takes 2 s for all that is launched between two of them."""

    made = 0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.made += 1
        self.at = 2000.0 * Event.made

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, later: Event) -> float:
        assert later.waited
        return later.at - self.at


def test_a_gpu_tells_the_time_of_its_steps() -> None:
    with patch.object(torch.cuda, "Event", Event):
        began, ended = (DeviceEvent(torch.device("cuda", 0)) for _ in range(2))
        assert ended.seconds_since(began) == 2.0
