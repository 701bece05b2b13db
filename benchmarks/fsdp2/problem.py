"""The tiny models and batches that both sides train on, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from gridformer.config import Family, ModelConfig
from gridformer.utils.batch import IGNORE, Batch

ROWS, LENGTH, SOURCE, STEPS = 36, 8, 6, 4
CLIP, RATE, DECAY, EPS = 0.05, 1e-2, 0.1, 1e-4
TOLERANCE = 1e-9  # relative to the largest element of a whole tensor, in float64
SEED = 1

_SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "n_heads": 4,
    "ffn_size": 40,
    "vocab_size": 29,
    "max_seq_len": LENGTH,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "n_layers": 2,
}
_OWN: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "t5": {"n_decoder_layers": 2, "relative_buckets": 8, "relative_max_distance": 8},
}


@dataclass(frozen=True)
class Method:
    """How a model is trained.

    Attributes:
        micro_batches: Micro-batches of each replica.
        clip_by: Whether all gradients are clipped by one norm, or those of each layer by their own.
        in_backward: Whether layers are updated within the backward pass.
        again: Whether layers are recomputed in the backward pass.
        reshards: Whether layers free gathered parameters after their passes.
        dtype: The type of the computation.
    """

    micro_batches: int = 1
    clip_by: Literal["global", "layer"] = "global"
    in_backward: bool = False
    again: bool = False
    reshards: bool = True
    dtype: Literal["float64", "bfloat16"] = "float64"


def model_of(family: Family) -> ModelConfig:
    return ModelConfig(family=family, **_SIZES, **_OWN[family])


def batch_of(config: ModelConfig, step: int) -> Batch:
    """Returns the global batch of a step, in which some targets are ignored."""
    generator = torch.Generator().manual_seed(100 + step)

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator)

    batch = {"tokens": draw(config.vocab_size, ROWS, LENGTH)}
    here = draw(4, ROWS, LENGTH) > 0
    batch["targets"] = draw(config.vocab_size, ROWS, LENGTH).where(here, IGNORE)
    if config.two_stacks:
        batch["source"] = draw(config.vocab_size, ROWS, SOURCE)
        batch["source_valid"] = draw(4, ROWS, SOURCE) > 0
        batch["source_valid"][:, 0] = True
    return batch
