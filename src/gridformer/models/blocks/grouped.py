"""Self-attention whose queries share heads of keys and values, with rotary positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gridformer.models.blocks.attention import Attention
from gridformer.models.blocks.cache import KVCache
from gridformer.models.blocks.clock import DropoutClock
from gridformer.models.blocks.joined import JoinedLinear
from gridformer.models.blocks.linear import Linear
from gridformer.models.blocks.norm import HeadNorm
from gridformer.models.blocks.rotary import Rotation
from gridformer.models.blocks.scores import ScoreBias


class GroupedAttention(Attention):
    """Causal attention of n heads of queries to m heads of keys and values (Ainslie et al. 2023).

    The columns of q, k and v are ordered [n, d] and [m, d], so that a contiguous block of columns
    holds whole heads.

    Args:
        qkv: The joined product of q [h, n d], k and v [h, m d].
        out: The product that closes the section.
        head_dim: Size d of a head.
        norms: The norms of each head's queries and keys, if there are any.
        window: A query sees this many keys at most, its own included; 0 means all of them.
        dropout: Probability of dropping an attention probability.
        site: The name of this module in dropout masks.
        clock: The step and rows on which dropout masks depend.

    Attributes:
        kv_heads: For each head of queries on this device, the index of the head of keys that it
            reads among those on this device. None means that n / m heads in a row share one.
    """

    qkv: JoinedLinear  # type: ignore[assignment]

    def __init__(
        self,
        qkv: JoinedLinear,
        out: Linear,
        head_dim: int,
        norms: tuple[HeadNorm, HeadNorm] | None,
        window: int,
        dropout: float,
        site: str,
        clock: DropoutClock,
    ) -> None:
        super().__init__(qkv, out, head_dim, True, True, dropout, site, clock)  # type: ignore[arg-type]
        self.window = window
        self.kv_heads: tuple[int, ...] | None = None
        self.q_norm: nn.Module | None
        self.k_norm: nn.Module | None
        self.q_norm, self.k_norm = norms or (None, None)

    def forward(  # type: ignore[override]
        self,
        x_BSH: Tensor,
        rotation: Rotation,
        mask: ScoreBias | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Attends from x [b, s, h] to itself, and to the tokens in `cache`, which it extends.

        Args:
            x_BSH: Input [b, s, h].
            rotation: The rotations of the positions of x.
            mask: The result of `added_to_scores` for causal attention with this module's window.
            cache: Keys and values of past tokens, for generation.
        """
        # The product may return more sequences, or longer ones, than this device has of x.
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv(x_BSH))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.transpose(1, 2) for part in (rotation.of(q), rotation.of(k), v))
        if cache is not None:
            k, v = cache.append(k, v, self.window)
        found = self.recompute.attention(self._grouped, q, k, v, mask)
        out: Tensor = self.out(found)
        return out

    def _grouped(self, q: Tensor, k: Tensor, v: Tensor, mask: ScoreBias | None) -> Tensor:
        if self.kv_heads is not None:
            # Views are stacked, because indexing would send the indices to a GPU at each call.
            k, v = (torch.stack([x[:, i] for i in self.kv_heads], 1) for x in (k, v))
        return self._attend(q, k, v, True, mask)
