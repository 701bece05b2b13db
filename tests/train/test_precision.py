"""float16 on one device: the loss scale, skipped steps, overflows; the settings of torch."""

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gridformer.config import LayoutConfig, ModelConfig, TrainConfig
from gridformer.mesh import Axes
from gridformer.parallel import build_parallel
from gridformer.train.in_flight_steps import (
    FIRST_SCALE,
    GROWS_AFTER,
    LARGEST_SCALE,
    LossScale,
    StepResult,
)
from gridformer.train.numerics import set_numerics
from gridformer.train.step import Stepper
from gridformer.utils.batch import next_words
from gridformer.utils.errors import DivergedError
from tests.support.multirank.exactness import tiny
from tests.support.twice import differing

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


@pytest.mark.parametrize("clip_by", ["global", "layer"])
def test_the_scale_changes_no_update(clip_by: str) -> None:
    """Updates use unscaled but clipped gradients; a power of two causes no rounding."""
    found, norms = [], []
    for dtype, scale in (("float32", 1.0), ("float16", 2.0**8), ("float16", 2.0**12)):
        device = stepper(dtype, clip_by=clip_by)
        device.scale.scale = scale
        norms.append(step(device, 0).grad_norm)
        grads = [p.grad for p in device.model.parameters() if p.grad is not None]
        found.append(torch.cat([grad.flatten() for grad in grads]))
    assert norms == [pytest.approx(norms[0], rel=3e-3)] * 3
    assert norms[0] > 1.0, "the test must clip"
    for half in found[1:]:
        assert clip_by == "layer" or float(half.norm()) == pytest.approx(1.0, rel=1e-4)
        assert float((half - found[0]).norm()) < 3e-3


@pytest.mark.parametrize("forward", [False, True])
def test_an_overflow_that_no_scale_can_fix_ends_the_run(forward: bool) -> None:
    """That is one at scale 1, or in the forward pass, which comes before the scale."""
    device = stepper()
    step(device, 0)
    said = r"the gradient norm inf; nothing was updated\. .*use train\.dtype=bfloat16"
    if forward:
        said = r"the loss is nan .*use train\.dtype=bfloat16"
        with torch.no_grad():
            device.model.get_parameter("norm.weight").mul_(2.0**20)  # float32 can hold it
    else:
        device.scale.scale = 1.0
    before, scale = everything(device), replace(device.scale)
    with pytest.raises(DivergedError, match=said):
        step(device, 1, 1.0 if forward else math.inf)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(device), strict=True))
    assert device.scale == scale


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


WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(WORKSPACE, "")  # is put back afterward
    monkeypatch.delenv(WORKSPACE)
    yield
    set_numerics(TrainConfig())


@pytest.mark.parametrize("on", [True, False])
def test_tf32_is_a_setting(on: bool) -> None:
    set_numerics(TrainConfig(tf32=not on))
    set_numerics(TrainConfig(tf32=on))
    assert torch.backends.cuda.matmul.allow_tf32 is on
    assert torch.backends.cudnn.allow_tf32 is on
    assert torch.backends.cuda.matmul.fp32_precision == ("tf32" if on else "ieee")


def test_products_accumulate_in_float32() -> None:
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = True
    set_numerics(TrainConfig())
    assert not products.allow_bf16_reduced_precision_reduction
    assert not products.allow_fp16_reduced_precision_reduction
    assert not products.allow_fp16_accumulation


def test_deterministic_kernels_are_a_setting() -> None:
    set_numerics(TrainConfig())
    assert not torch.are_deterministic_algorithms_enabled()
    assert WORKSPACE not in os.environ
    set_numerics(TrainConfig(deterministic=True))
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ[WORKSPACE] == ":4096:8"
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


def test_a_step_needs_no_kernel_without_a_deterministic_form() -> None:
    """That holds for a CPU; on GPUs torch raises an error at the first such kernel."""
    set_numerics(TrainConfig(deterministic=True))
    config = tiny(max_seq_len=8, dropout=0.1, attention_dropout=0.1)
    model = build_parallel(config, LayoutConfig(), Axes(), 1, torch.device("cpu"), "bfloat16")
    stepper = Stepper(model, TrainConfig(global_batch=2, dtype="bfloat16"), Axes())
    stepper(0, lambda rows: next_words(torch.zeros(2, 9, dtype=torch.long)[rows]))


def test_the_same_steps_twice_give_the_same_bits_on_a_cpu() -> None:
    """On GPUs that is tested in tests/gpu/test_deterministic.py."""
    assert differing("cpu", {}, {}) == []
    assert "loss and norm" in differing("cpu", {}, {}, seeds=(1, 2)), "another seed is noticed"
