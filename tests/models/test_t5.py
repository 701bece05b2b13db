"""The plain T5 computes what T5ForConditionalGeneration computes from the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gridformer.models.blocks import IGNORE, KVCache
from tests.support.reference.shared import (
    assert_close,
    lengths_mask,
    tokens_of,
)
from tests.support.reference.t5 import V, from_hugging_face, pair

# Theirs computes sums of squares and softmax in float32 for any type, so float32 is compared.
DTYPES = pytest.mark.parametrize("dtype", [torch.float32], ids=str)


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
def test_cached_decoding_equals_full_decoding(dtype: torch.dtype, pieces: list[int]) -> None:
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
