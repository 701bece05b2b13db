"""Hugging Face's GPT-2 with random weights, and our GPT-2 with the same weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gridformer.config import LayoutConfig, ModelConfig
from gridformer.mesh import Axes
from gridformer.models import GPT2
from gridformer.parallel import build_parallel
from tests.support.reference.shared import randomize, transformers

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
    """Convert Hugging Face's names to ours; the columns of qkv go from [3, n, d] to [n, 3, d]."""
    h, n = config.hidden_size, config.n_heads
    ours = {
        "tokens.weight": state["transformer.wte.weight"],
        "positions.weight": state["transformer.wpe.weight"],
        "norm.weight": state["transformer.ln_f.weight"],
        "norm.bias": state["transformer.ln_f.bias"],
    }
    parts = {
        "norm1": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "norm2": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }
    for i in range(config.n_layers):
        for our_part, their_part in parts.items():
            for leaf in ("weight", "bias"):
                value = state[f"transformer.h.{i}.{their_part}.{leaf}"]
                if our_part == "attention.qkv":
                    by_head = value.unflatten(-1, (3, n, h // n)).transpose(-3, -2)
                    value = by_head.flatten(-3)
                ours[f"layers.{i}.{our_part}.{leaf}"] = value
    return ours


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
