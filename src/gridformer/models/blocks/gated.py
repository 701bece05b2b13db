"""A layer of Llama-like models: rotary grouped attention and a gated feed-forward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridformer.config import ModelConfig
from gridformer.models.blocks.cache import KVCache
from gridformer.models.blocks.clock import DropoutClock
from gridformer.models.blocks.dropout import Dropout
from gridformer.models.blocks.grouped import GroupedAttention
from gridformer.models.blocks.joined import JoinedLinear, PartSize
from gridformer.models.blocks.layer import Layer
from gridformer.models.blocks.linear import Init, Linear, Role
from gridformer.models.blocks.norm import HeadNorm, RMSNorm
from gridformer.models.blocks.rotary import Rotation
from gridformer.models.blocks.scores import ScoreBias


class GatedFeedForward(nn.Module):
    """Computes down(silu(gate(x)) * up(x)): [b, s, h] to [b, s, h] (Shazeer 2020)."""

    def __init__(self, up: JoinedLinear, down: Linear) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x_BSH: Tensor) -> Tensor:
        out: Tensor = self.down(_Gated.apply(*self.up(x_BSH)))
        return out


class _Gated(torch.autograd.Function):
    """Computes silu(gate) * up and keeps both factors, but not silu(gate)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        activated = F.silu(gate)
        # See gridformer.models.blocks.norm.
        return activated * up if torch.compiler.is_compiling() else activated.mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        grad_gate = torch.ops.aten.silu_backward(grads[0] * up, gate)
        return grad_gate, F.silu(gate).mul_(grads[0])


class GatedLayer(Layer):
    """One layer of Llama-like models, [b, s, h] to [b, s, h]: x + f(norm(x)) for each sub-layer f.

    Args:
        config: The model's config.
        clock: The step and rows on which dropout masks depend.
        site: The name of the layer in dropout masks.
    """

    def __init__(self, config: ModelConfig, clock: DropoutClock, site: str) -> None:
        super().__init__()
        h, f, d, eps = config.hidden_size, config.ffn_size, config.head_width, config.norm_eps
        n, m, init = config.n_heads, config.kv_heads, Init(std=config.init_std)
        self.norm1 = RMSNorm(h, eps, "qkv")
        parts = {
            "q": PartSize(n * d, init),
            "k": PartSize(m * d, init, m),
            "v": PartSize(m * d, init, m),
        }
        qkv = JoinedLinear(h, parts, Role("qkv", "attention"), config.qkv_bias)
        out = Linear(n * d, h, Role("out", "attention", opens=False), init, bias=False)
        norms = (HeadNorm(d, eps), HeadNorm(d, eps)) if config.qk_norm else None
        drop, where = config.attention_dropout, f"{site}.attention"
        self.attention = GroupedAttention(qkv, out, d, norms, config.window, drop, where, clock)
        self.dropout1 = Dropout(config.dropout, f"{site}.dropout1", clock)
        self.norm2 = RMSNorm(h, eps, "up")
        halves = {"gate": PartSize(f, init), "up": PartSize(f, init)}
        up = JoinedLinear(h, halves, Role("up", "feed_forward"))
        down = Linear(f, h, Role("down", "feed_forward", opens=False), init, bias=False)
        self.mlp = GatedFeedForward(up, down)
        self.dropout2 = Dropout(config.dropout, f"{site}.dropout2", clock)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        mask: ScoreBias | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Runs the layer on x [b, s, h]; for the other arguments see `GroupedAttention`."""
        x = x + self.dropout1(self.attention(self.norm1(x), rotation, mask, cache))
        return x + self.dropout2(self.mlp(self.norm2(x)))
