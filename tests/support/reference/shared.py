"""Helpers for comparisons with Hugging Face's models."""

from __future__ import annotations

import os

# must be set before transformers is imported; nothing is downloaded
os.environ["HF_HUB_OFFLINE"] = "1"

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from gridformer.checkpoint.convert.kinds import KINDS
from gridformer.checkpoint.convert.table import TableEntry
from gridformer.config import LayoutConfig, ModelConfig
from gridformer.mesh import Axes
from gridformer.models import Model
from gridformer.parallel import build_parallel

transformers: Any = pytest.importorskip("transformers")

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def randomize(model: Any, dtype: torch.dtype, spread: float = 0.2) -> Any:
    """Draw weights, biases and norms with a spread that makes every part matter."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            mean = 1.0 if parameter.dim() == 1 and bool((parameter == 1).all()) else 0.0
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(mean + spread * noise)
    return model.to(dtype).eval()


def plain(config: ModelConfig, dtype: torch.dtype, state: dict[str, Tensor]) -> Model:
    """Return our model of a config with these weights."""
    name = str(dtype).removeprefix("torch.")
    ours = build_parallel(config, LayoutConfig(), Axes(), 0, torch.device("cpu"), name).eval()
    ours.load_state_dict(state, strict=True)
    return ours


def tokens_of(v: int, b: int, s: int, seed: int = 1) -> Tensor:
    return torch.randint(0, v, (b, s), generator=torch.Generator().manual_seed(seed))


def lengths_mask(lengths: list[int], s: int) -> Tensor:
    """Return True for the first tokens of each row."""
    return torch.arange(s) < torch.tensor(lengths)[:, None]


def assert_close(got: Tensor, want: Tensor) -> None:
    """Compare to 1e-5 of the largest element (1e-10 in float64)."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    difference = float((got - want).detach().abs().max() / want.detach().abs().max())
    assert difference < TOLERANCE[got.dtype], difference


def entries_of(config: ModelConfig) -> list[TableEntry]:
    """Return how parameters are stored, which is the same for all kinds of a family."""
    return next(kind for kind in KINDS.values() if kind.family == config.family).entries(config)


def to_ours(entries: list[TableEntry], theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return our parameters, given all tensors of a model of Hugging Face by name."""
    return {one.ours: one.form.ours([theirs[name] for name in one.theirs]) for one in entries}
