"""The original Transformer against torch.nn.Transformer with the same weights, and its details."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gridformer.models.blocks import SinusoidalPositions
from tests.support.reference.shared import assert_close, lengths_mask, tokens_of
from tests.support.reference.transformer import V, model_of, published, torchs


@pytest.mark.parametrize("eps", [1e-5, 0.1])
@pytest.mark.parametrize("position", ["post", "pre"])
def test_logits(position: str, eps: float) -> None:
    ours = model_of(norm_position=position, norm_eps=eps)
    theirs = torchs(ours)
    source, tokens = tokens_of(V, 3, 20), tokens_of(V, 3, 11, seed=2)
    valid = lengths_mask([20, 7, 1], 20)
    table = ours.tokens.weight

    def embed(t: Tensor) -> Tensor:
        return table[t] * math.sqrt(48) + published(t.shape[1], 48)

    future = torch.ones(11, 11, dtype=torch.bool).triu(1)
    with torch.no_grad():
        hidden = theirs(
            embed(source),
            embed(tokens),
            tgt_mask=future,
            src_key_padding_mask=~valid,
            memory_key_padding_mask=~valid,
        )
        assert_close(ours(source, tokens, valid), hidden @ table.t())


@pytest.mark.parametrize("start", [0, 5])
def test_sinusoids(start: int) -> None:
    found = SinusoidalPositions(8)(6, start, torch.zeros(1, dtype=torch.float64))
    assert torch.allclose(found, published(start + 6, 8)[start:], atol=1e-12)


def test_sinusoids_come_in_blocks() -> None:
    whole = SinusoidalPositions(12)
    want = whole(6, 2, torch.zeros(1))
    part = SinusoidalPositions(12)
    part.part, part.columns = (1, 2), (2, 3)
    assert torch.equal(part(6, 2, torch.zeros(1)), want[3:, 8:])


def test_labels_are_smoothed_in_training_alone() -> None:
    ours = model_of(label_smoothing=0.1)
    source, tokens = tokens_of(V, 2, 9), tokens_of(V, 2, 7, seed=2)
    batch = {"source": source, "tokens": tokens, "targets": tokens_of(V, 2, 7, seed=3)}
    logits = ours(source, tokens).flatten(0, 1)
    for smoothing in (0.1, 0.0):
        ours.train(smoothing > 0)
        want = F.cross_entropy(
            logits, batch["targets"].flatten(), reduction="sum", label_smoothing=smoothing
        )
        assert_close(ours.losses(batch)["tokens"].detach(), want.detach())
