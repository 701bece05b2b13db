"""The layers of all families: attention and feed-forward with residuals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from gridformer.config import ModelConfig
from gridformer.models.blocks.attention import Attention, CrossAttention, GroupedAttention, KVCache
from gridformer.models.blocks.dropout import Dropout, DropoutRng
from gridformer.models.blocks.experts import Balance, MixtureOfExperts
from gridformer.models.blocks.linear import (
    Activation,
    FeedForward,
    GatedProduct,
    Init,
    Linear,
    MergedLinear,
    PartSize,
    Role,
)
from gridformer.models.blocks.norm import NormKind, RMSNorm, new_norm
from gridformer.models.blocks.rotary import Rotation
from gridformer.models.blocks.sequence import SegmentBias


@dataclass(frozen=True)
class Spread:
    """The standard deviations with which the matrices of a layer are initialized."""

    q: float
    k: float
    v: float
    out: float
    up: float
    down: float


@dataclass(frozen=True)
class Style:
    """How the layers of one family differ from those of others.

    Attention scores are divided by sqrt(d) if `scaled`.
    """

    spread: Spread
    activation: Activation
    norm: NormKind = "layer"
    bias: bool = True
    scaled: bool = True


class Layer(nn.Module):
    """The base class of layers, [b, s, h] to [b, s, h], by which others find them in a model."""

    attention: Attention
    norm1: nn.Module
    norm2: nn.Module
    mlp: nn.Module


class StyledLayer(Layer):
    """One layer in the style of a family.

    For each sub-layer f it computes x + f(norm(x)) if `norm_position` is pre, and norm(x + f(x)) if
    it is post.

    `site` is the layer's name, such as `layers.3` or `decoder.layers.0`; what precedes it is in
    the names of products, too. The decoder of two stacks has cross-attention.
    """

    mlp: FeedForward

    def __init__(
        self,
        config: ModelConfig,
        style: Style,
        dropout_rng: DropoutRng,
        site: str,
        causal: bool,
    ) -> None:
        super().__init__()
        stack = site.partition("layers.")[0]
        self.crossed = stack == "decoder."
        h, f, d = config.hidden_size, config.ffn_size, config.head_width
        inner, spread = config.n_heads * d, style.spread
        self.post = config.norm_position == "post"
        source = stack == "encoder."

        def linear(
            name: str, n_in: int, n_out: int, std: float | tuple[float, ...], opens: bool = True
        ) -> Linear:
            section: Literal["attention", "feed_forward"] = (
                "feed_forward" if name in ("up", "down") else "attention"
            )
            reads: Literal["tokens", "source"] = "source" if source or name == "kv" else "tokens"
            role = Role(stack + name, section, opens, reads)
            return Linear(n_in, n_out, role, Init(std=std, width=d), style.bias)

        def norm(reader: str) -> nn.Module:
            alone = None if self.post else stack + reader  # post: the residual reads it as well
            return new_norm(style.norm, h, config.norm_eps, alone)

        self.norm1 = norm("qkv")
        qkv = linear("qkv", h, 3 * inner, (spread.q, spread.k, spread.v))
        out = linear("out", inner, h, spread.out, opens=False)
        self.attention = Attention(
            qkv, out, config, f"{site}.attention", dropout_rng, causal, style.scaled
        )
        self.dropout1 = Dropout(config.dropout, f"{site}.dropout1", dropout_rng)
        if self.crossed:
            self.cross_norm = norm("q")
            q = linear("q", h, inner, spread.q)
            kv = linear("kv", h, 2 * inner, (spread.k, spread.v))
            out = linear("cross_out", inner, h, spread.out, opens=False)
            self.cross_attention = CrossAttention(
                q, kv, out, config, f"{site}.cross_attention", dropout_rng, style.scaled
            )
            self.cross_dropout = Dropout(config.dropout, f"{site}.cross_dropout", dropout_rng)
        self.norm2 = norm("up")
        up = linear("up", h, f, spread.up)
        down = linear("down", f, h, spread.down, opens=False)
        self.mlp = FeedForward(up, down, style.activation)
        self.dropout2 = Dropout(config.dropout, f"{site}.dropout2", dropout_rng)

    def forward(
        self,
        x: Tensor,
        mask: SegmentBias = None,
        cache: KVCache | None = None,
        memory: Tensor | None = None,
        memory_mask: SegmentBias = None,
    ) -> Tensor:
        """Runs the layer on x [b, s, h]."""
        if self.post:
            x = self.norm1(x + self.dropout1(self.attention(x, mask, cache)))
            if self.crossed:
                crossed = self.cross_attention(x, memory, memory_mask, cache)
                x = self.cross_norm(x + self.cross_dropout(crossed))
            done: Tensor = self.norm2(x + self.dropout2(self.mlp(x)))
            return done
        x = x + self.dropout1(self.attention(self.norm1(x), mask, cache))
        if self.crossed:
            crossed = self.cross_attention(self.cross_norm(x), memory, memory_mask, cache)
            x = x + self.cross_dropout(crossed)
        return x + self.dropout2(self.mlp(self.norm2(x)))


class GatedFeedForward(nn.Module):
    """Computes down(silu(gate(x)) * up(x)): [b, s, h] to [b, s, h] (Shazeer 2020)."""

    def __init__(self, up: MergedLinear, down: Linear) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x_BSH: Tensor) -> Tensor:
        out: Tensor = self.down(GatedProduct.apply(*self.up(x_BSH)))
        return out


class GatedLayer(Layer):
    """One layer of Llama-like models: x + f(norm(x)) for each sub-layer f, on x [b, s, h].

    With a `balance`, the second one is a mixture of experts.
    """

    def __init__(
        self,
        config: ModelConfig,
        dropout_rng: DropoutRng,
        site: str,
        balance: Balance | None = None,
    ) -> None:
        super().__init__()
        h, d, eps = config.hidden_size, config.head_width, config.norm_eps
        n, m, init = config.n_heads, config.kv_heads, Init(std=config.init_std)
        self.norm1 = RMSNorm(h, eps, "qkv")
        parts = {
            "q": PartSize(n * d, init),
            "k": PartSize(m * d, init, m),
            "v": PartSize(m * d, init, m),
        }
        qkv = MergedLinear(h, parts, Role("qkv", "attention"), config.qkv_bias)
        out = Linear(n * d, h, Role("out", "attention", opens=False), init, bias=False)
        self.attention = GroupedAttention(qkv, out, config, f"{site}.attention", dropout_rng)
        self.dropout1 = Dropout(config.dropout, f"{site}.dropout1", dropout_rng)
        self.norm2 = RMSNorm(h, eps, "up" if balance is None else None)
        if balance is None:
            self.mlp: nn.Module = _gated(h, config.ffn_size, init)
        else:
            shared = _gated(h, config.shared_size, init) if config.shared_size else None
            layer = int(site.rpartition(".")[2])
            self.mlp = MixtureOfExperts(config, layer, balance, shared)
        self.dropout2 = Dropout(config.dropout, f"{site}.dropout2", dropout_rng)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        mask: SegmentBias = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Runs the layer on x [b, s, h]; for the other arguments see `GroupedAttention`."""
        x = x + self.dropout1(self.attention(self.norm1(x), rotation, mask, cache))
        return x + self.dropout2(self.mlp(self.norm2(x)))


def _gated(h: int, f: int, init: Init) -> GatedFeedForward:
    """Returns a gated feed-forward of inner width f."""
    halves = {"gate": PartSize(f, init), "up": PartSize(f, init)}
    up = MergedLinear(h, halves, Role("up", "feed_forward"))
    return GatedFeedForward(
        up, Linear(f, h, Role("down", "feed_forward", opens=False), init, False)
    )
