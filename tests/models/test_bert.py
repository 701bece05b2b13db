"""The plain BERT computes what Hugging Face's BertForPreTraining computes from the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gridformer.config import ModelConfig
from gridformer.models import BERT
from gridformer.models.blocks import IGNORE
from tests.support.reference.bert import S, V, config_of, from_hugging_face, pair
from tests.support.reference.shared import (
    DTYPES,
    assert_close,
    lengths_mask,
    plain,
    randomize,
    tokens_of,
)


@DTYPES
@pytest.mark.parametrize(
    "changes",
    [{}, {"n_heads": 1}, {"ffn_size": 80}, {"n_layers": 1}, {"norm_eps": 0.1}],
    ids=str,
)
def test_logits(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    """Compare logits of words and of the sentence pair, with padding and any lengths of B."""
    ours, theirs = pair(dtype, **changes)
    tokens = tokens_of(V, 3, S)
    segments = (~lengths_mask([9, 24, 1], S)).long()
    valid = lengths_mask([24, 17, 5], S)
    batch = {"tokens": tokens, "segments": segments, "valid": valid}
    with torch.no_grad():
        got = ours.logits({**batch, "pair": torch.zeros(3, dtype=torch.int64)})
        want = theirs(tokens, attention_mask=valid.long(), token_type_ids=segments)
        assert_close(got["tokens"][valid], want.prediction_logits[valid])
        assert_close(got["pair"], want.seq_relationship_logits.flip(-1))
        assert_close(ours(tokens), theirs(tokens).prediction_logits)


@DTYPES
def test_losses_and_gradients(dtype: torch.dtype) -> None:
    """Hugging Face's loss is the sum of the two means; its next-sentence label 0 is our 1."""
    ours, theirs = pair(dtype)
    tokens, segments = tokens_of(V, 4, S), (~lengths_mask([9, 24, 1, 12], S)).long()
    targets = torch.where(torch.rand(4, S) < 0.15, tokens_of(V, 4, S, seed=2), IGNORE)
    follows = torch.tensor([1, 0, 0, 1])
    out = theirs(tokens, token_type_ids=segments)
    words = F.cross_entropy(out.prediction_logits.flatten(0, 1), targets.flatten())
    want = words + F.cross_entropy(out.seq_relationship_logits, 1 - follows)
    want.backward()
    batch = {"tokens": tokens, "segments": segments, "targets": targets, "pair": follows}
    losses, counts = ours.losses(batch), ours.counts(batch)
    assert {name: int(n) for name, n in counts.items()} == {
        "tokens": int((targets != IGNORE).sum()),
        "pair": 4,
    }
    got = losses["tokens"] / counts["tokens"] + losses["pair"] / counts["pair"]
    got.backward()
    assert_close(got.detach(), want.detach())
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    expected = from_hugging_face(grads, ours.config)
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        if name.endswith("qkv.bias"):  # the keys' part is rounding noise around zero
            continue
        assert_close(parameter.grad, expected[name])


def test_parameters_are_counted_alike() -> None:
    ours, theirs = pair(torch.float32)
    assert sum(p.numel() for p in ours.parameters()) == theirs.num_parameters()


def test_pre_norm_puts_a_norm_before_each_sub_layer_and_one_at_the_end() -> None:
    """Megatron has x + f(norm(x)), no norm of the embedding, and one before the head."""
    ours = plain(
        config := config_of(norm_position="pre"),
        torch.float64,
        plain_state(config),
    )
    assert isinstance(ours, BERT)
    tokens = tokens_of(V, 2, S)
    x = ours.tokens(tokens) + ours.positions(S) + ours.segments(torch.zeros_like(tokens))
    layer: Any
    for layer in ours.layers.values():
        x = x + layer.attention(layer.norm1(x))
        x = x + layer.mlp(layer.norm2(x))
    words = ours.head_norm(F.gelu(ours.transform(ours.norm(x))))
    want = words @ ours.tokens.weight.t() + ours.head.bias
    assert_close(ours(tokens), want)


def plain_state(config: ModelConfig) -> dict[str, Tensor]:
    """Return random weights for every parameter of a model."""
    from gridformer.models import build_model

    model = build_model(config).double()
    return {name: p.detach() for name, p in randomize(model, torch.float64).named_parameters()}
