"""Small networks of transformers with experts, and their inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tests.support.marks import extra

Made = tuple[nn.Module, Any, Mapping[str, str] | None]
MOE = {"num_experts_per_tok": 2, "hidden_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}


def causal(kind: str, config: Any, words: int, **more: Any) -> tuple[nn.Module, Any]:
    """Return a language model with sizes, and tokens with labels."""
    transformers = extra("transformers")
    model = getattr(transformers, kind)(config(vocab_size=words, use_cache=False, **more))
    tokens = torch.randint(words, (8, 12), generator=torch.Generator().manual_seed(1))
    return model, {"input_ids": tokens, "labels": tokens}


def mixtral() -> Made:
    """Five experts of two matrices, one of them fused; two heads of keys."""
    config = extra("transformers").MixtralConfig
    return (*causal("MixtralForCausalLM", config, 97, **MOE, **HEADS, num_local_experts=5), None)


def deepseek() -> Made:
    """Latent attention, a dense layer, then experts with shared ones beside them."""
    config = extra("transformers").DeepseekV3Config
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 48}
    latent = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
    routed = {"n_routed_experts": 6, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1}
    more = {**heads, **latent, **routed, "v_head_dim": 10, "first_k_dense_replace": 1}
    return (*causal("DeepseekV3ForCausalLM", config, 97, **MOE, **more), None)


def qwen3() -> Made:
    """Six experts, of which a token has three."""
    sizes = {**MOE, **HEADS, "num_experts": 6, "moe_intermediate_size": 16, "head_dim": 8}
    sizes |= {"num_experts_per_tok": 3, "norm_topk_prob": True}
    return (*causal("Qwen3MoeForCausalLM", extra("transformers").Qwen3MoeConfig, 97, **sizes), None)


def olmoe() -> Made:
    """Norms over all queries and all keys."""
    sizes = {**MOE, **HEADS, "num_experts": 4, "num_key_value_heads": 4, "eos_token_id": 0}
    return (*causal("OlmoeForCausalLM", extra("transformers").OlmoeConfig, 97, **sizes), None)


def gpt_oss() -> Made:
    """Experts with biases, of which the plan for expert parallelism alone tells."""
    config = extra("transformers").GptOssConfig
    sizes = {**MOE, **HEADS, "num_local_experts": 5, "head_dim": 8, "eos_token_id": 0}
    module, inputs = causal("GptOssForCausalLM", config, 97, **sizes, pad_token_id=0)
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return module, inputs, None


def idle() -> Made:
    """Mixtral, whose tokens all pass the same two of five experts in the first step."""
    module, inputs, plan = mixtral()
    for name, parameter in module.named_parameters():
        if name.endswith("gate.weight"):
            torch.nn.init.zeros_(parameter)
    return module, inputs, plan


NETWORKS = {made.__name__: made for made in (mixtral, qwen3, deepseek, olmoe, gpt_oss, idle)}
