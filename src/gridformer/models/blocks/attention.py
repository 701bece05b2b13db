"""Self-attention, grouped and cross-attention, and the keys and values that generation keeps."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridformer.config import ModelConfig
from gridformer.models.blocks import scores as scores_module
from gridformer.models.blocks.dropout import DropoutRng, DropoutSite, keep_scores
from gridformer.models.blocks.linear import Linear, MergedLinear
from gridformer.models.blocks.norm import AllHeadsNorm, HeadNorm
from gridformer.models.blocks.recompute import Recompute
from gridformer.models.blocks.rotary import Rotation
from gridformer.models.blocks.scores import MaskInParts, ScoreBias, ScoreParts, SharedBias, past
from gridformer.models.blocks.sequence import SegmentBias, SequenceRows
from gridformer.models.kernels import attention as kernel
from gridformer.models.kernels import library


class AttentionHeads(DropoutSite):
    """The part that all attentions share: from q, k and v of this device's heads to their results.

    With `fused`, a GPU uses a kernel of `gridformer.models.kernels` where PyTorch has no fused one:
    with dropout, and with what `added_to_scores` returns.
    """

    def __init__(
        self, config: ModelConfig, site: str, dropout_rng: DropoutRng, scaled: bool
    ) -> None:
        super().__init__(config.attention_dropout, site, dropout_rng)
        self.head_dim = config.head_width
        self.scale = 1.0 / math.sqrt(self.head_dim) if scaled else 1.0
        self.head_block = 0  # index of the block of heads that this device holds
        # For each head of queries here, the index of the head of keys here that it reads; None
        # means that equally many in a row share one
        self.kv_heads: tuple[int, ...] | None = None
        self.recompute = Recompute()
        self.sequence = SequenceRows()

    def _heads_of(
        self, q_BNSD: Tensor, k_BNTD: Tensor, v_BNTD: Tensor, causal: bool, masks: SegmentBias
    ) -> Tensor:
        """Returns `_attend`, to the tokens of all rows where they divide the sequence."""
        # Masks of dropout count the heads of a device, and a table those of all its queries.
        whole = (self.training and self.p > 0.0) or self.kv_heads is not None
        qkv = q_BNSD, k_BNTD, v_BNTD
        return self.sequence.attend(self._attend, *qkv, causal, masks, whole)

    def _attend(
        self,
        q_BNSD: Tensor,
        k_BNTD: Tensor,
        v_BNTD: Tensor,
        causal: bool,
        mask: ScoreBias | None,
        first_query: int = 0,
        first_key: int = 0,
    ) -> Tensor:
        """Returns the heads' results concatenated, [b, s, n d]. For mask see `added_to_scores`.

        There may be fewer heads of keys and values; then n / m queries in a row share one. If
        `causal`, the last query and the last key are at the same position. Dropout depends on the
        positions of the first query and the first key.
        """
        b, _, s, d = q_BNSD.shape
        seen = k_BNTD.shape[2]
        if self.kv_heads is not None:
            # Views are stacked, because indexing would send the indices to a GPU at each call.
            k_BNTD, v_BNTD = (
                torch.stack([x[:, i] for i in self.kv_heads], 1) for x in (k_BNTD, v_BNTD)
            )
        dropped = self.training and self.p > 0.0
        fits = self.fused and d * q_BNSD.element_size() <= kernel.MAX_HEAD_BYTES
        if isinstance(mask, ScoreParts) and not fits:
            mask = mask.sum(s, q_BNSD.dtype)
        causal = causal and mask is None and s > 1
        if causal and s < seen and not dropped:
            mask = self._lower_right(q_BNSD, seen, fits)
        if isinstance(mask, MaskInParts):
            if not dropped:
                in_parts = partial(scores_module.attention_in_parts, mask=mask, scale=self.scale)
                o_BNSD = self.recompute.fused(in_parts, q_BNSD, k_BNTD, v_BNTD)
                return o_BNSD.transpose(1, 2).reshape(b, s, -1)
            mask = mask.whole()
        if isinstance(mask, SharedBias):
            mask = mask.of_layer()
        if mask is None and dropped and fits and library.available(q_BNSD.device, q_BNSD.dtype):
            mask = ScoreParts(None, None, causal)
        if isinstance(mask, ScoreParts):
            o_BNSD = self._fused(q_BNSD, k_BNTD, v_BNTD, mask, first_query, first_key)
            return o_BNSD.transpose(1, 2).reshape(b, s, -1)
        if dropped:
            mask = past(s, seen, q_BNSD.device) if causal else mask
            o_BNSD = self._unfused(q_BNSD, k_BNTD, v_BNTD, mask, first_query, first_key)
        else:
            causal = causal and mask is None
            shared = {"enable_gqa": True} if k_BNTD.shape[1] < q_BNSD.shape[1] else {}
            plain: Callable[..., Tensor] = F.scaled_dot_product_attention
            attend = partial(plain, attn_mask=mask, is_causal=causal, scale=self.scale, **shared)
            o_BNSD = self.recompute.fused(attend, q_BNSD, k_BNTD, v_BNTD)
        return o_BNSD.transpose(1, 2).reshape(b, s, -1)

    @staticmethod
    def _lower_right(q: Tensor, seen: int, fits: bool) -> Tensor | ScoreParts | MaskInParts:
        """Returns the causal mask of the last queries [b, n, s, d] of `seen` positions.

        PyTorch's `is_causal` aligns the first query with the first key. Its flash kernel can align
        the last ones, too, but other kernels of it would take a mask of s x S numbers.
        """
        s, dtype, device = q.shape[2], q.dtype, q.device
        if q.is_cuda and dtype in (torch.bfloat16, torch.float16):
            # It loads torch's compiler, which is slow.
            from torch.nn.attention.bias import causal_lower_right

            return causal_lower_right(s, seen)
        if fits and library.available(device, dtype):
            return ScoreParts(None, None, causal=True)
        return MaskInParts(s, seen, True, 0, dtype, device)

    def _fused(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        parts: ScoreParts,
        first_query: int,
        first_key: int,
    ) -> Tensor:
        """Attention in a kernel that computes the same dropout mask as `_unfused`."""
        window = 0 if parts.window is None else parts.window.size
        settings, counter = kernel.Settings(parts.causal, self.scale, window=window), None
        if self.training and self.p > 0.0:
            head, counter = self._first_head(q), self.counter(q.device)
            settings = kernel.Settings(
                parts.causal, self.scale, head, self.p, window, first_query, first_key
            )
        attend = partial(
            kernel.attention,
            valid_BT=parts.valid,
            bias_NST=parts.bias,
            settings=settings,
            documents=parts.documents,
            counter=counter,
        )
        return self.recompute.fused(attend, q, k, v)

    def _first_head(self, q: Tensor) -> int:
        """Returns the global index of the first of the heads of q."""
        block, rows = self.head_block, self.sequence
        if rows.by_heads:
            block = block * rows.n + rows.index
        return block * q.shape[1]

    def _unfused(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        first_query: int,
        first_key: int,
    ) -> Tensor:
        """Attention with a globally indexed dropout mask, which PyTorch's kernels do not have."""
        b, n, s, _ = q.shape
        if k.shape[1] < n:
            k, v = (x.repeat_interleave(n // x.shape[1], 1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) * self.scale
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        elif mask is not None:
            scores = scores + mask
        shape = b, n, s, k.shape[2]
        first = self._first_head(q), first_query, first_key
        keep = keep_scores(self.counter(q.device), shape, first, self.p)
        probabilities = torch.softmax(scores, -1) * keep / (1.0 - self.p)
        return probabilities.to(v.dtype) @ v


class Attention(AttentionHeads):
    """Multi-head self-attention, [b, s, h] to [b, s, h].

    The columns of `qkv` are ordered [n, 3, d], so that a contiguous block of columns holds whole
    heads. They can then be sharded over any number of devices that divides n.
    """

    def __init__(
        self,
        qkv: Linear | MergedLinear,
        out: Linear,
        config: ModelConfig,
        site: str,
        dropout_rng: DropoutRng,
        causal: bool = True,
        scaled: bool = True,
    ) -> None:
        super().__init__(config, site, dropout_rng, scaled)
        self.causal = causal
        self.qkv, self.out = qkv, out

    def forward(
        self,
        x_BSH: Tensor,
        mask: SegmentBias = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Attends from x [b, s, h] to itself, and to the tokens in `cache`, which it extends.

        `mask` is the result of `added_to_scores`, called with this module's `causal`.
        """
        q, k, v = _heads(self.qkv(x_BSH), 3, self.head_dim)
        if cache is not None:
            k, v = cache.append(k, v)
        heads = self.recompute.attention(self._heads_of, q, k, v, self.causal, mask)
        out: Tensor = self.out(heads)
        return out


class CrossAttention(AttentionHeads):
    """Multi-head attention from a sequence to a source. Columns of `kv` are ordered [n, 2, d]."""

    def __init__(
        self,
        q: Linear,
        kv: Linear,
        out: Linear,
        config: ModelConfig,
        site: str,
        dropout_rng: DropoutRng,
        scaled: bool,
    ) -> None:
        super().__init__(config, site, dropout_rng, scaled)
        self.q, self.kv, self.out = q, kv, out

    def forward(
        self,
        x_BSH: Tensor,
        memory_BTH: Tensor,
        mask: SegmentBias = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Attends from x to the encoder's output, which is read only once with a cache.

        `mask` is the result of `added_to_scores` for the source's padding.
        """
        (q,) = _heads(self.q(x_BSH), 1, self.head_dim)
        if cache is not None and cache.source is not None:
            k, v = cache.source
        else:
            k, v = _heads(self.kv(memory_BTH), 2, self.head_dim)
        if cache is not None:
            cache.source = k, v
        heads = self.recompute.attention(self._heads_of, q, k, v, False, mask)
        out: Tensor = self.out(heads)
        return out


def _heads(x: Tensor, n_parts: int, head_dim: int) -> tuple[Tensor, ...]:
    """Splits [b, s, n * n_parts * d] into `n_parts` tensors [b, n, s, d]."""
    b, s, _ = x.shape
    return x.view(b, s, -1, n_parts, head_dim).permute(3, 0, 2, 1, 4).unbind(0)


class KVCache:
    """One layer's keys and values of past tokens and of the source, for generation.

    Attributes:
        k: Keys of the past tokens [b, n, s, d]; None before the first one.
        v: Values of the past tokens.
        first: The position of the first token in `k` and `v`; a window forgets those before it.
        source: Keys and values of the source.
    """

    def __init__(self) -> None:
        self.first = 0
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        self.source: tuple[Tensor, Tensor] | None = None

    def append(self, k_BNSD: Tensor, v_BNSD: Tensor, window: int = 0) -> tuple[Tensor, Tensor]:
        """Adds keys and values of new tokens [b, n, s, d] and returns those of all tokens.

        With a window, no new token sees more than `window` - 1 of the past tokens, and the others
        are forgotten.
        """
        if self.k is not None and self.v is not None:
            unseen = max(0, self.k.shape[2] - window + 1) if window else 0
            self.first += unseen
            k_BNSD = torch.cat((self.k[:, :, unseen:], k_BNSD), 2)
            v_BNSD = torch.cat((self.v[:, :, unseen:], v_BNSD), 2)
        self.k, self.v = k_BNSD, v_BNSD
        return k_BNSD, v_BNSD

    def keep(self, n: int) -> None:
        """Forgets the tokens from position n on."""
        if self.k is not None and self.v is not None:
            kept = max(0, n - self.first)
            self.k, self.v = self.k[:, :, :kept], self.v[:, :, :kept]

    def select(self, rows: Tensor) -> None:
        """Keeps the sequences that `rows` indexes, in that order, as a beam search needs."""
        if self.k is not None and self.v is not None:
            self.k, self.v = self.k[rows], self.v[rows]
        if self.source is not None:
            self.source = self.source[0][rows], self.source[1][rows]


class GroupedAttention(Attention):
    """Causal attention of n heads of queries to m heads of keys and values (Ainslie et al. 2023).

    The columns of q, k and v are ordered [n, d] and [m, d], so that a contiguous block of columns
    holds whole heads.
    """

    def __init__(
        self,
        qkv: MergedLinear,
        out: Linear,
        config: ModelConfig,
        site: str,
        dropout_rng: DropoutRng,
    ) -> None:
        super().__init__(qkv, out, config, site, dropout_rng)
        self.window, d, eps = config.window, config.head_width, config.norm_eps
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if config.qk_norm and config.qk_norm_over == "all":
            self.q_norm = AllHeadsNorm(config.n_heads * d, eps)
            self.k_norm = AllHeadsNorm(config.kv_heads * d, eps)
        elif config.qk_norm:
            self.q_norm, self.k_norm = HeadNorm(d, eps), HeadNorm(d, eps)

    def forward(  # type: ignore[override]
        self,
        x_BSH: Tensor,
        rotation: Rotation,
        mask: SegmentBias = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Attends from x [b, s, h] to itself, and to the tokens in `cache`, which it extends.

        `mask` is the result of `added_to_scores` for causal attention with this module's window.
        """
        # The product may return more sequences, or longer ones, than this device has of x.
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv(x_BSH))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.transpose(1, 2) for part in (rotation.of(q), rotation.of(k), v))
        if cache is not None:
            k, v = cache.append(k, v, self.window)
        heads = self.recompute.attention(self._heads_of, q, k, v, True, mask)
        out: Tensor = self.out(heads)
        return out
