"""Hugging Face's T5 with random weights, and our T5 with the same weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gridformer.config import ModelConfig
from gridformer.models import T5
from tests.support.reference.shared import (
    entries_of,
    plain,
    randomize,
    to_ours,
    transformers,
)

V = 211


def config_of(**changes: Any) -> ModelConfig:
    values = {
        "family": "t5",
        "n_layers": 2,
        "n_decoder_layers": 3,
        "hidden_size": 48,
        "n_heads": 4,
        "vocab_size": V,
        "max_seq_len": 64,
        "norm_eps": 1e-6,
    }
    return ModelConfig(**{**values, **changes})


def hugging_face(config: ModelConfig, dtype: torch.dtype) -> Any:
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=config.vocab_size,
            d_model=config.hidden_size,
            d_kv=config.head_width,
            d_ff=config.ffn_size,
            num_layers=config.n_layers,
            num_decoder_layers=config.n_decoder_layers,
            num_heads=config.n_heads,
            relative_attention_num_buckets=config.relative_buckets,
            relative_attention_max_distance=config.relative_max_distance,
            layer_norm_epsilon=config.norm_eps,
            feed_forward_proj="relu",
            tie_word_embeddings=True,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=1,
        )
    )
    return randomize(model, dtype)


def from_hugging_face(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    return to_ours(entries_of(config), state)


def pair(dtype: torch.dtype, **changes: Any) -> tuple[T5, Any]:
    config = config_of(**changes)
    theirs = hugging_face(config, dtype)
    ours = plain(config, dtype, from_hugging_face(theirs.state_dict(), config))
    assert isinstance(ours, T5)
    return ours, theirs
