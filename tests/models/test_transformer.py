"""The original Transformer against torch.nn.Transformer with the same weights, and its details."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridformer.config import ModelConfig
from gridformer.models import Transformer, build_model
from gridformer.models.blocks import SinusoidalPositions
from tests.support.reference.shared import assert_close, lengths_mask, plain, randomize, tokens_of

V = 97


def model_of(**changes: Any) -> Transformer:
    values = {
        "family": "transformer",
        "n_layers": 2,
        "n_decoder_layers": 3,
        "hidden_size": 48,
        "n_heads": 4,
        "vocab_size": V,
        "max_seq_len": 32,
    }
    config = ModelConfig(**{**values, **changes})
    weights = randomize(build_model(config).double(), torch.float64).named_parameters()
    model = plain(config, torch.float64, {name: p.detach() for name, p in weights})
    assert isinstance(model, Transformer)
    return model


def torchs(ours: Transformer) -> nn.Transformer:
    """torch.nn.Transformer with our weights; it has q, k, v side by side, and norms of its own at
    the ends, which are left out."""
    config = ours.config
    h, d = config.hidden_size, config.head_width
    theirs = nn.Transformer(
        h,
        config.n_heads,
        config.n_layers,
        config.n_decoder_layers,
        config.ffn_size,
        dropout=0.0,
        batch_first=True,
        layer_norm_eps=config.norm_eps,
        norm_first=config.norm_position == "pre",
    ).double()

    def apart(x: Tensor, parts: int) -> Tensor:
        return x.unflatten(-1, (-1, parts, d)).transpose(-3, -2).flatten(-3)

    def attention(to: nn.MultiheadAttention, q: list[Any], out: Any) -> None:
        for leaf in ("weight", "bias"):
            wide = [apart(getattr(linear, leaf), n) for linear, n in q]
            getattr(to, f"in_proj_{leaf}").copy_(torch.cat(wide, -1).t())
        copy(to.out_proj, out)

    def copy(to: Any, ours: Any) -> None:
        to.weight.copy_(ours.weight.t())
        to.bias.copy_(ours.bias)

    with torch.no_grad():
        for name, stack in (("encoder", ours.encoder), ("decoder", ours.decoder)):
            for i in range(len(stack.layers)):
                layer: Any = stack.layers[str(i)]
                to: Any = getattr(theirs, name).layers[i]
                attention(to.self_attn, [(layer.attention.qkv, 3)], layer.attention.out)
                norms = [layer.norm1, layer.norm2]
                if name == "decoder":
                    cross = layer.cross_attention
                    attention(to.multihead_attn, [(cross.q, 1), (cross.kv, 2)], cross.out)
                    norms = [layer.norm1, layer.cross_norm, layer.norm2]
                for number, norm in enumerate(norms, start=1):
                    copy(getattr(to, f"norm{number}"), norm)
                copy(to.linear1, layer.mlp.up)
                copy(to.linear2, layer.mlp.down)
            if config.norm_position == "pre":
                copy(getattr(theirs, name).norm, stack.norm)
            else:
                getattr(theirs, name).norm = None
    return theirs.eval()


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


def published(s: int, h: int) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i/h)), PE(pos, 2i+1) = cos of the same."""
    rows = [
        [(math.sin if j % 2 == 0 else math.cos)(pos / 10000 ** ((j - j % 2) / h)) for j in range(h)]
        for pos in range(s)
    ]
    return torch.tensor(rows, dtype=torch.float64)


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
