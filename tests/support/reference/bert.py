"""Hugging Face's BERT with random weights, and our BERT with the same weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gridformer.config import ModelConfig
from gridformer.models import BERT
from tests.support.reference.shared import (
    entries_of,
    plain,
    randomize,
    to_ours,
    transformers,
)

V, S = 211, 24


def config_of(**changes: Any) -> ModelConfig:
    values = {
        "family": "bert",
        "n_layers": 3,
        "hidden_size": 48,
        "n_heads": 4,
        "vocab_size": V,
        "max_seq_len": S,
        "norm_eps": 1e-12,
    }
    return ModelConfig(**{**values, **changes})


def hugging_face(config: ModelConfig, dtype: torch.dtype) -> Any:
    model = transformers.BertForPreTraining(
        transformers.BertConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            intermediate_size=config.ffn_size,
            max_position_embeddings=config.max_seq_len,
            layer_norm_eps=config.norm_eps,
            hidden_act="gelu",
            pad_token_id=None,
            attn_implementation="eager",
        )
    )
    return randomize(model, dtype)


def from_hugging_face(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    return to_ours(entries_of(config), state)


def pair(dtype: torch.dtype, **changes: Any) -> tuple[BERT, Any]:
    config = config_of(**changes)
    theirs = hugging_face(config, dtype)
    ours = plain(config, dtype, from_hugging_face(theirs.state_dict(), config))
    assert isinstance(ours, BERT)
    return ours, theirs
