"""The plain GPT-2 computes what Hugging Face's GPT2LMHeadModel computes from the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gridformer.models.blocks import IGNORE, KVCache
from tests.support.reference.gpt2 import V, from_hugging_face, pair
from tests.support.reference.shared import DTYPES, assert_close, tokens_of


@DTYPES
@pytest.mark.parametrize(
    "changes",
    [{}, {"n_heads": 1}, {"n_heads": 48}, {"ffn_size": 80}, {"norm_eps": 0.1}, {"n_layers": 1}],
    ids=str,
)
def test_logits(dtype: torch.dtype, changes: dict[str, Any]) -> None:
    """The attention scale, the tanh form of GELU and the norm's epsilon are GPT-2's."""
    ours, theirs = pair(dtype, **changes)
    for s in (1, 7, 32):
        tokens = tokens_of(V, 3, s)
        with torch.no_grad():
            assert_close(ours(tokens), theirs(tokens).logits)


@DTYPES
def test_loss(dtype: torch.dtype) -> None:
    """Ours is the sum over targets that count; theirs is the mean, and shifts targets itself."""
    ours, theirs = pair(dtype)
    tokens = tokens_of(V, 3, 20)
    labels = tokens.clone()
    labels[1, 5:9] = IGNORE
    targets = labels[:, 1:]
    with torch.no_grad():
        want = theirs(tokens, labels=labels).loss  # in float32, whatever the model's type
        got = ours.loss_sum(tokens[:, :-1], targets) / (targets != IGNORE).sum()
    assert got.dtype == dtype
    assert_close(got.float(), want)


@DTYPES
def test_gradients(dtype: torch.dtype) -> None:
    ours, theirs = pair(dtype)
    tokens = tokens_of(V, 3, 20)
    logits = theirs(tokens[:, :-1]).logits
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").backward()
    ours.loss_sum(tokens[:, :-1], tokens[:, 1:]).backward()
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    want = from_hugging_face(grads, ours.config)
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None, name
        assert_close(parameter.grad, want[name])


@DTYPES
def test_parameters_are_counted_alike(dtype: torch.dtype) -> None:
    ours, theirs = pair(dtype)
    assert sum(p.numel() for p in ours.parameters()) == theirs.num_parameters()


# --------------------------------------------------------------------------- generation


@DTYPES
@pytest.mark.parametrize(
    "pieces",
    [
        [1] * 12,
        [5, 1, 1, 1, 1, 1, 1, 1],
        [12],
        [1, 11],
        [4, 3, 1, 4],
    ],
    ids=str,
)
def test_cached_forward_equals_full_forward(dtype: torch.dtype, pieces: list[int]) -> None:
    """Tokens fed one by one, or after a prompt, give the logits of all of them at once."""
    ours, _ = pair(dtype)
    tokens = tokens_of(V, 2, 12)
    caches = [KVCache() for _ in ours.layers]
    start, logits = 0, []
    with torch.no_grad():
        for size in pieces:
            logits.append(ours(tokens[:, start : start + size], caches, start))
            start += size
        assert_close(torch.cat(logits, 1), ours(tokens))


def test_greedy_tokens() -> None:
    """Greedy decoding with our cache gives the words of model.generate.

    It uses float64, so that no word depends on how a processor rounds.
    """
    ours, theirs = pair(torch.float64)
    prompt = tokens_of(V, 2, 5)
    with torch.no_grad():
        want = theirs.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        got, new, start = prompt, prompt, 0
        caches = [KVCache() for _ in ours.layers]
        while got.shape[1] < 25:
            logits = ours(new, caches, start)
            start = got.shape[1]
            new = logits[:, -1:].argmax(-1)
            got = torch.cat((got, new), 1)
    assert torch.equal(got, want)
