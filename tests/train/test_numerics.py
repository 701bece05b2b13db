"""The settings of torch on which bits depend are those of the run."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from gridformer.config import LayoutConfig, TrainConfig
from gridformer.mesh import Axes
from gridformer.parallel import build_parallel
from gridformer.train.numerics import set_numerics
from gridformer.train.step import Stepper
from gridformer.utils.batch import next_words
from tests.support.multirank.exactness import tiny
from tests.support.twice import differing

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
