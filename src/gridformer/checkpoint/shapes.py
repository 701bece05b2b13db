"""The shapes of a model's parameters, without its memory."""

from __future__ import annotations

import torch

from gridformer.config import ModelConfig
from gridformer.models import build_model


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a model's parameters by name."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in build_model(config).named_parameters()}
