"""float16 on one device: the loss scale, skipped steps, and overflows that no scale can fix."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from gridformer.config import LayoutConfig, ModelConfig, TrainConfig
from gridformer.mesh import Axes
from gridformer.parallel import build_parallel
from gridformer.train import in_flight_steps as precision
from gridformer.train.in_flight_steps import (
    FIRST_SCALE,
    GROWS_AFTER,
    LARGEST_SCALE,
    LossScale,
    StepResult,
)
from gridformer.train.optimizer import learning_rate
from gridformer.train.step import Stepper
from gridformer.utils.batch import next_words
from gridformer.utils.errors import DivergedError

MODEL = ModelConfig(n_layers=2, hidden_size=16, n_heads=2, vocab_size=11, max_seq_len=4)


def stepper(dtype: str = "float16", **train: Any) -> Stepper:
    model = build_parallel(MODEL, LayoutConfig(), Axes(), 1, torch.device("cpu"), dtype)
    return Stepper(model, TrainConfig(global_batch=2, dtype=dtype, **train), Axes())  # type: ignore[arg-type]


def step(device: Stepper, number: int, poison: float = 1.0) -> StepResult:
    """Run a step; one gradient is multiplied by `poison`."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 11, (2, 5), generator=generator)
    weight = device.model.get_parameter("layers.1.mlp.up.weight")
    handle = weight.register_hook(lambda grad: grad * poison)
    try:
        return device(number, lambda rows: next_words(tokens[rows]))
    finally:
        handle.remove()


def everything(device: Stepper) -> list[Tensor]:
    """Return copies of the parameters and the optimizer's state."""
    states = [state[key] for state in device.updates.state.values() for key in sorted(state)]
    return [tensor.detach().clone() for tensor in (*device.model.parameters(), *states)]


def test_the_scale_halves_and_grows() -> None:
    scale = LossScale.of("float16")
    assert scale.scale == FIRST_SCALE
    scale.overflowed()
    for _ in range(GROWS_AFTER - 1):
        scale.succeeded()
    assert (scale.scale, scale.skipped) == (FIRST_SCALE / 2, 1)
    scale.succeeded()
    assert (scale.scale, scale.good) == (FIRST_SCALE, 0)
    for _ in range(GROWS_AFTER - 1):
        scale.succeeded()
    scale.overflowed()
    for _ in range(GROWS_AFTER - 1):
        scale.succeeded()
    assert scale.scale == FIRST_SCALE / 2, "good steps are counted anew after an overflow"


def test_the_scale_has_bounds_and_comes_back_from_one() -> None:
    scale = LossScale(LARGEST_SCALE, dynamic=True)
    for _ in range(GROWS_AFTER):
        scale.succeeded()
    assert scale.scale == LARGEST_SCALE
    scale = LossScale(2.0, dynamic=True)
    scale.overflowed()
    assert scale.exhausted
    for _ in range(GROWS_AFTER):
        scale.succeeded()
    assert scale.scale == 2.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_other_types_have_none(dtype: str) -> None:
    scale = LossScale.of(dtype)
    for _ in range(GROWS_AFTER + 1):
        scale.succeeded()
    scale.go_on(4.0, 3)
    assert scale == LossScale()
    assert scale.exhausted


@pytest.mark.parametrize("poison", [math.inf, math.nan])
def test_an_overflow_skips_the_step(poison: float) -> None:
    device = stepper()
    assert not step(device, 0).skipped
    before = everything(device)
    result = step(device, 1, poison)
    assert result.skipped
    assert math.isfinite(result.loss)
    assert not math.isfinite(result.grad_norm)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(device), strict=True))
    assert (device.scale.scale, device.scale.skipped) == (FIRST_SCALE / 2, 1)
    assert not step(device, 2).skipped
    assert not any(torch.equal(a, b) for a, b in zip(before, everything(device), strict=True))
    assert {float(state["step"]) for state in device.updates.state.values()} == {2.0}, "updates"


def test_a_real_overflow_is_found_and_repaired() -> None:
    """At a scale where gradients exceed float16, steps are skipped until they fit."""
    device = stepper()
    device.scale.scale = 2.0**30
    n_skipped = 0
    while step(device, n_skipped).skipped:
        n_skipped += 1
        assert n_skipped < 25
    assert n_skipped > 5
    assert device.scale.scale == 2.0 ** (30 - n_skipped)


def test_good_steps_double_the_scale() -> None:
    device = stepper()
    with patch.object(precision, "GROWS_AFTER", 2):
        scales = [(step(device, number), device.scale.scale)[1] for number in range(4)]
    assert scales == [FIRST_SCALE, 2 * FIRST_SCALE, 2 * FIRST_SCALE, 4 * FIRST_SCALE]


def test_the_scale_changes_no_update() -> None:
    """Updates use unscaled but clipped gradients; a power of two causes no rounding."""
    found, norms = [], []
    for dtype, scale in (("float32", 1.0), ("float16", 2.0**8), ("float16", 2.0**12)):
        device = stepper(dtype)
        device.scale.scale = scale
        norms.append(step(device, 0).grad_norm)
        grads = [p.grad for p in device.model.parameters() if p.grad is not None]
        found.append(torch.cat([grad.flatten() for grad in grads]))
    assert norms == [pytest.approx(norms[0], rel=3e-3)] * 3
    assert norms[0] > 1.0, "the test must clip"
    for half in found[1:]:
        assert float(half.norm()) == pytest.approx(1.0, rel=1e-4)
        assert float((half - found[0]).norm()) < 3e-3


@pytest.mark.parametrize("clip_by", ["layer", "global"])
def test_each_unit_is_clipped_by_its_norm_without_the_scale(clip_by: str) -> None:
    """The reference is a manual loop over the scaled gradients, with torch's clipping and AdamW.

    Some layers' norms are above the bound and others below. AdamW's update hides how large a
    gradient was, but its moments do not.
    """
    device = stepper(clip_norm=0.9, clip_by=clip_by)
    device.scale.scale = 2.0**7
    copies = {name: nn.Parameter(p.detach().clone()) for name, p in device.model.named_parameters()}
    train = device.train
    groups: list[dict[str, Any]] = [
        {"params": [p for p in copies.values() if p.dim() == 2]},
        {"params": [p for p in copies.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups,
        lr=train.lr,
        betas=(train.beta1, train.beta2),
        eps=train.adam_eps,
        weight_decay=train.weight_decay,
    )
    units: list[list[nn.Parameter]] = [[*copies.values()]]
    if clip_by == "layer":
        inside = [
            [p for name, p in copies.items() if name.startswith(f"layers.{i}.") and p.dim() == 2]
            for i in range(MODEL.n_layers)
        ]
        rest = {*copies.values()} - {p for each in inside for p in each}
        units = [*inside, [*rest]]

    clipped = []
    for number in range(3):
        scaled: dict[str, Tensor] = {}
        with _told_of_gradients(device.model, scaled):
            assert not step(device, number).skipped
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(number, train)
        for name, copy in copies.items():
            copy.grad = scaled[name] / 2.0**7
        norms = [float(nn.utils.clip_grad_norm_(unit, 0.9)) for unit in units]
        clipped += [norm > 0.9 for norm in norms]
        optimizer.step()
    assert set(clipped) == ({True, False} if clip_by == "layer" else {True})
    state = device.updates.state
    for name, parameter in device.model.named_parameters():
        torch.testing.assert_close(parameter, copies[name], rtol=1e-5, atol=1e-7)
        for moment in ("exp_avg", "exp_avg_sq"):
            wanted = optimizer.state[copies[name]][moment]
            off = float((state[parameter][moment] - wanted).abs().max())
            assert off <= 1e-5 * float(wanted.abs().max()), (name, moment)


@contextmanager
def _told_of_gradients(model: nn.Module, found: dict[str, Tensor]) -> Iterator[None]:
    """Copy the gradients that a backward pass leaves, by parameter."""

    def remember(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        found[name] = parameter.grad.clone()

    handles = [
        parameter.register_post_accumulate_grad_hook(partial(remember, name))
        for name, parameter in model.named_parameters()
    ]
    yield
    for handle in handles:
        handle.remove()


def test_an_overflow_at_scale_one_ends_the_run() -> None:
    device = stepper()
    step(device, 0)
    device.scale.scale = 1.0
    before = everything(device)
    with pytest.raises(
        DivergedError,
        match=r"the gradient norm inf; nothing was updated\. .*use train\.dtype=bfloat16",
    ):
        step(device, 1, math.inf)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(device), strict=True))
    assert device.scale.skipped == 0


def test_a_forward_pass_that_overflows_ends_the_run() -> None:
    """The scale is applied after the forward pass and cannot fix it."""
    device = stepper()
    step(device, 0)
    with torch.no_grad():
        device.model.get_parameter("norm.weight").mul_(2.0**20)  # float32 can hold it
    before = everything(device)
    with pytest.raises(DivergedError, match=r"the loss is nan .*use train\.dtype=bfloat16"):
        step(device, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(device), strict=True))
    assert device.scale == LossScale(FIRST_SCALE, good=1, dynamic=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_stays_float32(dtype: str) -> None:
    """Parameters, gradients and moments stay float32; activations and logits do not."""
    device = stepper(dtype)
    seen = {}
    for name in ("layers.0", "layers.0.norm1", "head"):
        module = device.model.get_submodule(name)
        module.register_forward_hook(lambda _, __, out, name=name: seen.update({name: out.dtype}))
    step(device, 0)
    half = getattr(torch, dtype)
    assert seen == {"layers.0": half, "layers.0.norm1": half, "head": half}
    for parameter in device.model.parameters():
        assert parameter.grad is not None
        assert {parameter.dtype, parameter.grad.dtype} == {torch.float32}
    assert {t.dtype for state in device.updates.state.values() for t in state.values()} == {
        torch.float32
    }
