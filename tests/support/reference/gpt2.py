"""Hugging Face's GPT-2 with random weights, and our GPT-2 with the same weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gridformer.config import LayoutConfig, ModelConfig
from gridformer.mesh import Axes
from gridformer.models import GPT2
from gridformer.parallel import build_parallel
from tests.support.reference.shared import entries_of, randomize, to_ours, transformers

V = 211


def hugging_face(config: ModelConfig, dtype: torch.dtype) -> Any:
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.max_seq_len,
            n_embd=config.hidden_size,
            n_layer=config.n_layers,
            n_head=config.n_heads,
            n_inner=config.ffn_size,
            layer_norm_epsilon=config.norm_eps,
            activation_function="gelu_new",
            attn_implementation="eager",
        )
    )
    return randomize(model, dtype)


def from_hugging_face(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    return to_ours(entries_of(config), state)


def pair(dtype: torch.dtype, **changes: Any) -> tuple[GPT2, Any]:
    values = {
        "n_layers": 3,
        "hidden_size": 48,
        "n_heads": 4,
        "vocab_size": V,
        "max_seq_len": 32,
    }
    config = ModelConfig(**{**values, **changes})
    name = str(dtype).removeprefix("torch.")
    ours = build_parallel(config, LayoutConfig(), Axes(), 0, torch.device("cpu"), name).eval()
    assert isinstance(ours, GPT2)
    theirs = hugging_face(config, dtype)
    ours.load_state_dict(from_hugging_face(theirs.state_dict(), config), strict=True)
    return ours, theirs
