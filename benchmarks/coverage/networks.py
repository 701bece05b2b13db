"""Every architecture of transformers that carries a plan for tensor parallelism, made small."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import configuration_auto, modeling_auto

from gridformer.prove import _loss, in_float64

# Values by the names that configs have for them. A config takes those that it knows.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("num_global_key_value_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff"), 96),
    **dict.fromkeys(("head_dim", "v_head_dim", "global_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_num_experts",), 4),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("ffn_hidden_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16),
    "n_shared_experts": 1,
    "num_kv_shared_layers": 0,
    **dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "num_topk_groups"), 1),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 96),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    "hidden_size_per_layer_input": 16,
    "max_position_embeddings": 64,
    "image_size": 32,
    "use_cache": False,
}
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
# What one architecture needs beside them.
_OWN: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {**_ROPE, "mrope_section": [4, 2, 2]}}
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "embedding_gemma2_text": {"global_head_dim": 16, "num_global_key_value_heads": 2},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [32, 32],
        "rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]},
    },
    "glm5_next_text": {"qk_rope_head_dim": 0},
    "llama4_vision_model": {
        "patch_size": 8,
        "intermediate_size": 4 * 64,
        **dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 64),
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 8},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 32},
}
_EMPTY = ("qwen3_omni_moe_talker_text",)  # whose experts have no initial values
# What it is called with beside tokens, of these sizes, or in their place.
_INPUTS: dict[str, dict[str, tuple[int, ...]]] = {
    "llama4_vision_model": {"pixel_values": (8, 3, 32, 32)},
    "qwen3_omni_moe_talker_text": {"inputs_embeds": (8, 12, 64)},
    "qwen3_omni_moe_talker_code_predictor": {"inputs_embeds": (8, 12, 64)},
    "muse_glimmer_assistant": {
        "noise_embeds": (8, 12, 64),
        "context_hidden_states": (8, 12, 5 * 64),
    },
    "voxtral_realtime_text": {"t_cond": (8, 1, 64)},
    "t5gemma2_decoder": {"encoder_hidden_states": (8, 12, 64)},
}
_WORDS, _MOST = 96, 20_000_000
# Some networks want as many heads of keys as of queries, more layers, or a window.
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"num_hidden_layers": 4},
    {"sliding_window": 8},
    {"num_hidden_layers": 4, "num_key_value_heads": 4},
)


def architectures() -> list[str]:
    """Returns the names of architectures whose configs carry a plan."""
    names = configuration_auto.CONFIG_MAPPING_NAMES
    return [name for name in names if getattr(_config_of(name), "base_model_tp_plan", None)]


def _config_of(name: str) -> Any:
    return getattr(transformers, configuration_auto.CONFIG_MAPPING_NAMES[name])


def is_causal(kind: type[nn.Module]) -> bool:
    """Whether it is a language model that computes a loss."""
    return kind.__name__.endswith("ForCausalLM")


def class_of(name: str) -> Any:
    """Returns the language model of an architecture, or else a model made from its config."""
    config = _config_of(name)
    if known := modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(name):
        return getattr(transformers, known)
    kinds: dict[str, Any] = {
        kind.__name__: kind
        for kind in vars(_code_of(config)).values()
        if isinstance(kind, type)
        and issubclass(kind, transformers.PreTrainedModel)
        and getattr(kind, "config_class", None) is config
        and not kind.__name__.endswith("PreTrainedModel")
    }
    for task in ("ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", ""):
        if names := [one for one in kinds if one.endswith(task)]:
            return kinds[names[0]]
    raise ValueError(f"no model is made from {config.__name__} alone")


def _code_of(config: Any) -> Any:
    return importlib.import_module(config.__module__.replace(".configuration_", ".modeling_"))


def small(kind: Any, changes: dict[str, Any], own: dict[str, Any]) -> Any:
    """Returns a config of a model with few narrow layers, without dropout."""
    config = kind.config_class
    known = inspect.signature(config.__init__).parameters
    values = {key: value for key, value in {**_SIZES, **changes}.items() if key in known}
    rope = dict(getattr(config(), "rope_parameters", None) or {})
    of_kinds = any(isinstance(value, dict) for value in rope.values())
    if "mrope_section" in inspect.getsource(_code_of(config)) and not of_kinds:
        half = int(8 * rope.get("partial_rotary_factor", 1))
        sections = [half - 2 * (half // 3), half // 3, half // 3]
        values["rope_parameters"] = {**_ROPE, **rope}
        values["rope_parameters"]["mrope_section"] = sections
    made = config(**{**values, **own})
    for key, rate in vars(made).items():
        random = "dropout" in key or "jitter" in key or key.endswith("pdrop")
        if random and isinstance(rate, float):
            setattr(made, key, 0.0)
    made._experts_implementation = "eager"
    made.architectures = [kind.__name__]
    if not hasattr(made, "dropout_rate"):  # which some configs leave to those around them
        made.dropout_rate = 0.0
    return made


def build(name: str, changes: dict[str, Any]) -> tuple[nn.Module, dict[str, Tensor]]:
    """Returns a network with random weights, and its inputs; equal in every process."""
    kind = class_of(name)
    config = small(kind, changes, _OWN.get(name, {}))
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(config).parameters())
    if size > _MOST:
        raise ValueError(f"it has {size / 1e6:,.0f} million parameters: other networks are in it")
    torch.manual_seed(0)
    module = kind(config)
    for key, parameter in module.named_parameters():
        if name in _EMPTY and ".experts." in key:
            nn.init.normal_(parameter, std=0.02)
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(_WORDS, (8, 12), generator=draw)
    more = _INPUTS.get(name, {})
    inputs = {key: torch.randn(size, generator=draw).double() for key, size in more.items()}
    if {"pixel_values", "inputs_embeds", "noise_embeds"} & {*inputs}:
        return module, inputs
    return module, {**inputs, "input_ids": tokens} | ({"labels": tokens} if is_causal(kind) else {})


def first_that_runs(name: str) -> dict[str, Any]:
    """Returns the changes of sizes with which a network can compute a loss in one process.

    Raises:
        Exception: What the last of them raises.
    """
    for changes in CHANGES:
        try:
            module, inputs = build(name, changes)
            with in_float64():
                _loss(module.double().train()(**inputs)).backward()
            return changes
        except Exception as error:
            failure = error
    raise failure
