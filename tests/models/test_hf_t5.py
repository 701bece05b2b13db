"""The plain T5 computes what T5ForConditionalGeneration computes from the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gridformer.config import ModelConfig
from gridformer.models import T5
from gridformer.models.blocks import IGNORE, KVCache
from tests.support.reference.shared import (
    assert_close,
    lengths_mask,
    plain,
    randomize,
    together,
    tokens_of,
    transformers,
)

V = 211
# Theirs takes sums of squares and softmax in float32 whatever its type, so float32 is compared.
DTYPES = pytest.mark.parametrize("dtype", [torch.float32], ids=str)


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
    """Names of theirs to ours; their matrices are [out, in]."""
    ours = {"tokens.weight": state["shared.weight"]}
    for stack, n in (("encoder", config.n_layers), ("decoder", config.n_decoder_layers)):
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        ours[f"{stack}.bias.weight"] = state[bias]
        ours[f"{stack}.norm.weight"] = state[f"{stack}.final_layer_norm.weight"]
        for i in range(n):
            here, there = f"{stack}.layers.{i}", f"{stack}.block.{i}.layer"
            sub = f"{there}.0.SelfAttention"
            ours[f"{here}.norm1.weight"] = state[f"{there}.0.layer_norm.weight"]
            parts = [state[f"{sub}.{part}.weight"] for part in "qkv"]
            ours[f"{here}.attention.qkv.weight"] = together(parts, config.head_width)
            ours[f"{here}.attention.out.weight"] = state[f"{sub}.o.weight"].t()
            last = 1
            if stack == "decoder":
                sub, last = f"{there}.1.EncDecAttention", 2
                ours[f"{here}.cross_norm.weight"] = state[f"{there}.1.layer_norm.weight"]
                q, k, v, o = (state[f"{sub}.{part}.weight"] for part in "qkvo")
                ours[f"{here}.cross_attention.q.weight"] = q.t()
                ours[f"{here}.cross_attention.kv.weight"] = together([k, v], config.head_width)
                ours[f"{here}.cross_attention.out.weight"] = o.t()
            mlp = f"{there}.{last}"
            ours[f"{here}.norm2.weight"] = state[f"{mlp}.layer_norm.weight"]
            ours[f"{here}.mlp.up.weight"] = state[f"{mlp}.DenseReluDense.wi.weight"].t()
            ours[f"{here}.mlp.down.weight"] = state[f"{mlp}.DenseReluDense.wo.weight"].t()
    return ours


def pair(dtype: torch.dtype, **changes: Any) -> tuple[T5, Any]:
    config = config_of(**changes)
    theirs = hugging_face(config, dtype)
    ours = plain(config, dtype, from_hugging_face(theirs.state_dict(), config))
    assert isinstance(ours, T5)
    return ours, theirs


@DTYPES
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_heads": 1},
        {"head_dim": 16},
        {"ffn_size": 80},
        {"relative_buckets": 8, "relative_max_distance": 20},
        {"norm_eps": 0.1},
    ],
    ids=str,
)
def test_logits(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    """Distances up to 63 reach the widest buckets; sources have padding."""
    ours, theirs = pair(dtype, **changes)
    source, tokens = tokens_of(V, 3, 64), tokens_of(V, 3, 40, seed=2)
    valid = lengths_mask([64, 17, 1], 64)
    with torch.no_grad():
        got = ours(source, tokens, valid)
        want = theirs(source, attention_mask=valid.long(), decoder_input_ids=tokens).logits
        assert_close(got, want)
        assert_close(ours(source, tokens), theirs(source, decoder_input_ids=tokens).logits)


@DTYPES
def test_loss_and_gradients(dtype: torch.dtype) -> None:
    ours, theirs = pair(dtype)
    source, tokens = tokens_of(V, 3, 20), tokens_of(V, 3, 9, seed=2)
    targets = tokens_of(V, 3, 9, seed=3)
    targets[1, 6:] = IGNORE
    logits = theirs(source, decoder_input_ids=tokens).logits
    want = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    want.backward()
    got = ours.losses({"source": source, "tokens": tokens, "targets": targets})["tokens"]
    got.backward()
    assert_close(got.detach(), want.detach())
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    expected = from_hugging_face(grads, ours.config)
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        assert_close(parameter.grad, expected[name])


def test_parameters_are_counted_alike() -> None:
    ours, theirs = pair(torch.float32)
    assert sum(p.numel() for p in ours.parameters()) == theirs.num_parameters()


@DTYPES
@pytest.mark.parametrize("pieces", [[1] * 12, [5, 1, 6], [12]], ids=str)
def test_cached_decoding_is_the_whole_decoding(dtype: torch.dtype, pieces: list[int]) -> None:
    ours, _ = pair(dtype)
    source, tokens = tokens_of(V, 2, 20), tokens_of(V, 2, 12, seed=2)
    valid = lengths_mask([20, 7], 20)
    caches = [KVCache() for _ in ours.decoder.layers]
    start, logits = 0, []
    with torch.no_grad():
        memory = ours.encode({"source": source, "source_valid": valid})
        for size in pieces:
            piece = tokens[:, start : start + size]
            logits.append(ours.decode(piece, memory, valid, caches, start))
            start += size
        assert_close(torch.cat(logits, 1), ours(source, tokens, valid))
