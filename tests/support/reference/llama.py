"""Hugging Face's Llama, Mistral, Qwen2 and Qwen3 with random weights, and ours with the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gridformer.config import ModelConfig, RopeScaling
from gridformer.models import Llama
from tests.support.reference.shared import entries_of, plain, randomize, to_ours, transformers

V = 211
# What distinguishes the architectures besides sizes.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"window": 5},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
}


def config_of(architecture: str, **changes: Any) -> ModelConfig:
    values = {
        "family": "llama",
        "n_layers": 2,
        "hidden_size": 48,
        "n_heads": 4,
        "n_kv_heads": 2,
        "ffn_size": 80,
        "vocab_size": V,
        "max_seq_len": 64,
        "norm_eps": 1e-6,
        "tied_head": False,
    }
    return ModelConfig(**{**values, **ARCHITECTURES[architecture], **changes})


def hugging_face(architecture: str, config: ModelConfig, dtype: torch.dtype) -> Any:
    """Return their model.

    In float64 its norms and rotations, which it computes in float32 for any type, are replaced by
    the same in float64. Angles stay rounded to float32, as ours do.
    """
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= _scaling_of(config.rope_scaling)
    sizes = {
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tied_head,
        "attn_implementation": "sdpa",  # the eager one computes softmax in float32 for any type
    }
    if architecture == "mistral":
        sizes["sliding_window"] = config.window or None
    elif config.window:  # of Qwen2 and Qwen3, in layers from max_window_layers on
        sizes |= {"sliding_window": config.window, "max_window_layers": 0}
        sizes["use_sliding_window"] = True
    name = architecture.capitalize()
    their_config = getattr(transformers, f"{name}Config")(**sizes)
    model = randomize(getattr(transformers, f"{name}ForCausalLM")(their_config), dtype)
    if dtype == torch.float64:
        widened(model)
    return model


def _scaling_of(scaling: RopeScaling) -> dict[str, Any]:
    found = scaling.model_dump(exclude_defaults=True)
    found["rope_type"] = found.pop("kind")
    if scaling.kind == "llama3":  # theirs have no defaults
        found |= {key: getattr(scaling, key) for key in ("low_freq_factor", "high_freq_factor")}
    return found


def widened(model: Any) -> Any:
    """Let norms and rotations of a model of theirs compute in float64, and return it."""
    for module in model.modules():
        if type(module).__name__.endswith(("RMSNorm", "T5LayerNorm")):
            module.forward = _norm_of(module)
        elif type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = _rotation_of(module)
    return model


def _norm_of(module: Any) -> Any:
    def forward(x: Tensor) -> Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)
        out: Tensor = module.weight * (x * torch.rsqrt(mean + module.variance_epsilon))
        return out

    return forward


def _rotation_of(module: Any) -> Any:
    # Conversion to float64 has converted the frequencies, but their values are those of float32.
    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = (position_ids[..., None].float() * module.inv_freq.float()).double()
        angles, factor = torch.cat((angles, angles), -1), module.attention_scaling
        return angles.cos() * factor, angles.sin() * factor

    return forward


def from_hugging_face(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    return to_ours(entries_of(config), state)


def pair(architecture: str, dtype: torch.dtype, **changes: Any) -> tuple[Llama, Any]:
    config = config_of(architecture, **changes)
    theirs = hugging_face(architecture, config, dtype)
    ours = plain(config, dtype, from_hugging_face(theirs.state_dict(), config))
    assert isinstance(ours, Llama)
    return ours, theirs
