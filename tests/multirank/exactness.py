"""What one rank does to compare a layout with one device: used by several test modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gridformer.comm import Axes
from gridformer.config import LayoutConfig, ModelConfig, TrainConfig
from gridformer.layout import build_axes
from gridformer.parallel import build_parallel
from gridformer.parallel.gradients import assert_copies_equal, reduce_gradients
from gridformer.parallel.placement import shard_of
from gridformer.train.step import Stepper

CPU = torch.device("cpu")
TOLERANCE = {"float64": 1e-9, "float32": 1e-5}


def tiny(**changes: Any) -> ModelConfig:
    """A GPT-2 that every grid of the tests divides: n and h by 1, 2, 3, 4, 6, 12; v by none."""
    values = {
        "n_layers": 2,
        "hidden_size": 48,
        "n_heads": 12,
        "vocab_size": 89,
        "max_seq_len": 24,
    }
    return ModelConfig(**{**values, **changes})


def batch_of(step: int, config: ModelConfig, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (rows, config.max_seq_len + 1)
    return torch.randint(0, config.vocab_size, shape, generator=generator)


def compare(
    layout: dict[str, Any], model: dict[str, Any], train: dict[str, Any], n_steps: int = 5
) -> dict[str, float]:
    """The largest relative differences to one device: loss, gradients, parameters, norm.

    Relative to the largest element of the whole tensor of the reference.
    """
    config, settings = tiny(**model), TrainConfig(**train)
    torch.set_num_threads(1)
    plan = LayoutConfig(**layout)
    axes = build_axes(plan, "cpu")
    whole = build_parallel(config, LayoutConfig(), Axes(), settings.seed, CPU, settings.dtype)
    cut = build_parallel(config, plan, axes, settings.seed, CPU, settings.dtype)
    worst = {"init": _distance(cut, whole, "value"), "loss": 0.0, "norm": 0.0}

    reference = Stepper(whole, settings.model_copy(update={"micro_batches": 1}), Axes())
    stepper = Stepper(cut, settings, axes)
    batches = [batch_of(step, config, settings.global_batch) for step in range(n_steps)]
    worst["grad"] = _compare_gradients(whole, cut, reference, stepper, batches[0], axes)
    for step, batch in enumerate(batches):
        want = reference(step, lambda rows, batch=batch: batch[rows])  # type: ignore[misc]
        got = stepper(step, lambda rows, batch=batch: batch[rows])  # type: ignore[misc]
        assert got.tokens == want.tokens == batch[:, 1:].numel()
        worst["loss"] = max(worst["loss"], abs(got.loss / want.loss - 1))
        worst["norm"] = max(worst["norm"], abs(got.grad_norm / want.grad_norm - 1))
        if settings.clip_norm:
            assert want.grad_norm > settings.clip_norm, "the test must clip"
    worst["parameter"] = _distance(cut, whole, "value")
    assert_copies_equal(cut, axes)
    held = [lambda rows, b=b: b[rows] for b in batches]
    want_eval = reference.evaluate(held)  # type: ignore[arg-type]
    got_eval = stepper.evaluate(held)  # type: ignore[arg-type]
    worst["eval"] = abs(got_eval / want_eval - 1)
    return worst


def _compare_gradients(
    whole: torch.nn.Module,
    cut: torch.nn.Module,
    reference: Stepper,
    stepper: Stepper,
    batch: Tensor,
    axes: Axes,
) -> float:
    """Gradients of the sum of losses, before clipping, through the production reduction."""
    for model, step, the_axes in ((whole, reference, Axes()), (cut, stepper, axes)):
        model.train()
        model.zero_grad()
        for micro in range(step.train.micro_batches):
            rows = step.rows(micro)
            step.model.clock.first_sample = rows.start
            part = batch[rows]
            step.model.loss_sum(part[:, :-1], part[:, 1:]).backward()
        reduce_gradients(model, the_axes)
    return _distance(cut, whole, "grad")


def _distance(cut: torch.nn.Module, whole: torch.nn.Module, what: str) -> float:
    worst = 0.0
    reference = dict(whole.named_parameters())
    for name, parameter in cut.named_parameters():
        shard = shard_of(parameter)
        assert shard.size == tuple(reference[name].shape), name
        if what == "grad" and not shard.owned:
            continue
        mine, other = parameter.detach(), reference[name].detach()
        if what == "grad":
            assert parameter.grad is not None, name
            other_grad = reference[name].grad
            assert other_grad is not None
            mine, other = parameter.grad, other_grad
        want = shard.block_of(other, mine.shape)
        scale = float(other.abs().max())
        difference = float((mine - want).abs().max()) if mine.numel() else 0.0
        worst = max(worst, difference / scale if scale else difference)
    return worst
