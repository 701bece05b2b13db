"""Our Transformer with random weights, and torch.nn.Transformer with the same weights."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from gridformer.config import ModelConfig
from gridformer.models import Transformer, build_model
from tests.support.reference.shared import plain, randomize

V = 97


def model_of(**changes: Any) -> Transformer:
    values = {
        "family": "transformer", "n_layers": 2, "n_decoder_layers": 3, "hidden_size": 48,
        "n_heads": 4, "vocab_size": V, "max_seq_len": 32,
    }  # fmt: skip
    config = ModelConfig(**{**values, **changes})
    weights = randomize(build_model(config).double(), torch.float64).named_parameters()
    model = plain(config, torch.float64, {name: p.detach() for name, p in weights})
    assert isinstance(model, Transformer)
    return model


def torchs(ours: Transformer) -> nn.Transformer:
    """Return torch.nn.Transformer with our weights.

    It stores q, k and v side by side, and its own norms at the ends are left out.
    """
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


def published(s: int, h: int) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i/h)), PE(pos, 2i+1) = cos of the same."""
    rows = [
        [(math.sin if j % 2 == 0 else math.cos)(pos / 10000 ** ((j - j % 2) / h)) for j in range(h)]
        for pos in range(s)
    ]
    return torch.tensor(rows, dtype=torch.float64)
