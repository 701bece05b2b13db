"""Hugging Face's BERT with random weights, and our BERT with the same weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gridformer.config import ModelConfig
from gridformer.models import BERT
from tests.support.reference.shared import (
    LEAVES,
    plain,
    randomize,
    together,
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
    """Convert their names to ours; their matrices are [out, in]."""
    theirs = {
        "tokens.weight": "bert.embeddings.word_embeddings.weight",
        "positions.weight": "bert.embeddings.position_embeddings.weight",
        "segments.weight": "bert.embeddings.token_type_embeddings.weight",
    }
    ours = {name: state[key] for name, key in theirs.items()}
    ours["head.bias"] = state["cls.predictions.bias"]
    linears = {
        "transform": "cls.predictions.transform.dense",
        "pair.pooler": "bert.pooler.dense",
        "pair.labels": "cls.seq_relationship",
    }
    norms = {
        "embedding_norm": "bert.embeddings.LayerNorm",
        "head_norm": "cls.predictions.transform.LayerNorm",
    }
    for i in range(config.n_layers):
        here, there = f"layers.{i}", f"bert.encoder.layer.{i}"
        linears[f"{here}.attention.out"] = f"{there}.attention.output.dense"
        linears[f"{here}.mlp.up"] = f"{there}.intermediate.dense"
        linears[f"{here}.mlp.down"] = f"{there}.output.dense"
        norms[f"{here}.norm1"] = f"{there}.attention.output.LayerNorm"
        norms[f"{here}.norm2"] = f"{there}.output.LayerNorm"
        for leaf in LEAVES:
            parts = [
                state[f"{there}.attention.self.{part}.{leaf}"] for part in ("query", "key", "value")
            ]
            ours[f"{here}.attention.qkv.{leaf}"] = together(parts, config.head_width)
    for name, key in linears.items():
        ours |= {f"{name}.{leaf}": state[f"{key}.{leaf}"].t() for leaf in LEAVES}
    for name, key in norms.items():
        ours |= {f"{name}.{leaf}": state[f"{key}.{leaf}"] for leaf in LEAVES}
    return ours


def pair(dtype: torch.dtype, **changes: Any) -> tuple[BERT, Any]:
    config = config_of(**changes)
    theirs = hugging_face(config, dtype)
    ours = plain(config, dtype, from_hugging_face(theirs.state_dict(), config))
    assert isinstance(ours, BERT)
    return ours, theirs
