"""Self-attention and cross-attention, their masks and biases of scores, and the KV cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridformer.models.blocks.dropout import Clock, indices
from gridformer.models.blocks.linear import Init, Linear, new_parameter
from gridformer.models.blocks.recompute import Recompute
from gridformer.models.kernels import attention as kernel
from gridformer.models.kernels import library
from gridformer.utils import rng


class KVCache:
    """One layer's keys and values of past tokens and of the source, for generation."""

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        self.source: tuple[Tensor, Tensor] | None = None

    def append(self, k_BNSD: Tensor, v_BNSD: Tensor) -> tuple[Tensor, Tensor]:
        """Adds keys and values of new tokens [b, n, s, d] and returns those of all tokens."""
        if self.k is not None and self.v is not None:
            k_BNSD, v_BNSD = torch.cat((self.k, k_BNSD), 2), torch.cat((self.v, v_BNSD), 2)
        self.k, self.v = k_BNSD, v_BNSD
        return k_BNSD, v_BNSD

    def select(self, rows: Tensor) -> None:
        """Keeps the sequences that `rows` indexes, in that order, as a beam search needs."""
        if self.k is not None and self.v is not None:
            self.k, self.v = self.k[rows], self.v[rows]
        if self.source is not None:
            self.source = self.source[0][rows], self.source[1][rows]


class PaddingMask(nn.Module):
    """Turns valid [b, s], False for padding, into a mask of attention scores [b, 1, 1, s]."""

    def forward(self, valid_BS: Tensor) -> Tensor:
        return valid_BS[:, None, None, :]


class RelativeBias(nn.Module):
    """A learned bias of scores per head and bucket of distances (Raffel et al. 2020, section 2.1).

    Half of the buckets hold one distance each; the others hold logarithmically wider ranges up to
    `furthest`.

    Args:
        buckets: Number of buckets.
        furthest: The distance from which on all keys share the last bucket.
        n: Number of heads.
        both_ways: Whether queries also see later keys; each direction then has half of the buckets.
        std: The standard deviation with which the table is initialized.
    """

    def __init__(self, buckets: int, furthest: int, n: int, both_ways: bool, std: float) -> None:
        super().__init__()
        self.furthest, self.both_ways = furthest, both_ways
        self.weight = new_parameter(buckets, n, init=Init(std=std))

    def forward(self, queries: int, keys: int) -> Tensor:
        """Returns the bias [n, queries, keys] of the last `queries` of `keys` positions."""
        place = torch.arange(keys, device=self.weight.device)
        distance = place - place[keys - queries :, None]  # of a key from a query
        return F.embedding(self._bucket(distance), self.weight).permute(2, 0, 1)

    def _bucket(self, distance: Tensor) -> Tensor:
        n_buckets = self.weight.shape[0]
        first: Tensor | int = 0
        if self.both_ways:
            n_buckets //= 2
            first = (distance > 0) * n_buckets
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        exact = n_buckets // 2
        ratio = (distance.clamp(min=1).float() / exact).log() / math.log(self.furthest / exact)
        wide = exact + (ratio * (n_buckets - exact)).long()
        return first + torch.where(distance < exact, distance, wide.clamp(max=n_buckets - 1))


@dataclass(frozen=True)
class SharedBias:
    """A learned bias of scores that all layers of a stack read in bfloat16 or float16.

    Its memory is shared, and the gradients of the layers are added up in float32.

    Attributes:
        bias: The bias in float32 [n, s, S], which gets the gradients.
        values: What is added to the scores, without a graph.
        mask: Where a key may be attended to, or None.
    """

    bias: Tensor
    values: Tensor
    mask: Tensor | None

    def of_layer(self) -> Tensor:
        """Returns what one layer adds to its scores."""
        read: Tensor = _ReadBias.apply(self.bias, self.values, self.mask)
        return read


class _ReadBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias_NST: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        ctx.mask, ctx.dtype = mask, bias_NST.dtype
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0] if ctx.mask is None else grads[0].masked_fill(~ctx.mask, 0.0)
        return grad.sum(0, dtype=ctx.dtype), None, None


@dataclass(frozen=True)
class ScoreParts:
    """What `gridformer.models.kernels` adds to scores: parts, which are smaller than their sum.

    Attributes:
        valid: False where no query may attend to a key [b, S].
        bias: Bias of the scores [n, s, S].
        causal: See `added_to_scores`.
    """

    valid: Tensor | None
    bias: Tensor | None
    causal: bool

    def sum(self, queries: int, dtype: torch.dtype) -> Tensor | SharedBias | None:
        """Returns them as one tensor, for attention that the kernels cannot compute."""
        mask = None if self.valid is None else self.valid[:, None, None, :]
        out = added_to_scores(queries, dtype, mask, self.bias, self.causal)
        assert not isinstance(out, ScoreParts)
        return out


ScoreBias = Tensor | SharedBias | ScoreParts  # what `added_to_scores` returns


def added_to_scores(
    queries: int,
    dtype: torch.dtype,
    mask: Tensor | None = None,
    bias_NST: Tensor | None = None,
    causal: bool = False,
    fused: bool = False,
) -> ScoreBias | None:
    """Builds what all layers of a stack add to their scores, so that it exists once.

    Args:
        queries: Number of queries.
        dtype: The dtype of the result.
        mask: True where a key may be attended to [b, 1, 1, S]; see `PaddingMask`.
        bias_NST: Bias of the scores [n, s, S]; see `RelativeBias`.
        causal: Whether a query attends only to keys up to its own position. The last query and the
            last key are at the same position.
        fused: Whether attention may use the kernels of `gridformer.models.kernels`.

    Returns:
        [b or 1, n or 1, queries or 1, S], as a `SharedBias` if it needs gradients in another dtype;
        or the parts of that where a kernel takes them. None without `mask` and `bias_NST`:
        attention applies causality by itself.
    """
    which = bias_NST if mask is None else mask
    if which is None:
        return None
    if fused and library.available(which.device, dtype):
        valid = None if mask is None else mask[:, 0, 0, :]
        return ScoreParts(valid, None if bias_NST is None else bias_NST.contiguous(), causal)
    seen = which.shape[-1]
    if causal and queries > 1:
        past = _past(queries, seen, which.device)
        mask = past if mask is None else mask & past
    if bias_NST is None:
        assert mask is not None
        return torch.where(mask, 0.0, -torch.inf).to(dtype)
    bias = bias_NST.to(dtype).unsqueeze(0)
    if bias_NST.dtype != dtype and bias.requires_grad:
        bias = bias.detach()
        values = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
        return SharedBias(bias_NST, values, mask)
    return bias if mask is None else bias.masked_fill(~mask, -torch.inf)


def _past(queries: int, seen: int, device: torch.device) -> Tensor:
    """Returns a mask [queries, seen]: True where a key is not after the query's position."""
    return torch.ones(queries, seen, dtype=torch.bool, device=device).tril(seen - queries)


class _Heads(nn.Module):
    """The part that both attentions share: from q, k and v of this device's heads to their results.

    Args:
        head_dim: Size of a head.
        scaled: Whether scores are divided by sqrt(head_dim).
        dropout: Probability of dropping an attention probability.
        site: The name of this module in dropout masks.
        clock: The step and rows on which dropout masks depend.

    With `fused`, a GPU uses a kernel of `gridformer.models.kernels` where PyTorch has no fused one:
    with dropout, and with what `added_to_scores` returns.
    """

    def __init__(
        self, head_dim: int, scaled: bool, dropout: float, site: str, clock: Clock
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.scale = 1.0 / math.sqrt(head_dim) if scaled else 1.0
        self.dropout, self.site, self.clock = dropout, site, clock
        self.head_block = 0  # index of the block of heads that this device holds
        self.fused = True
        self.recompute = Recompute()

    def _attend(
        self,
        q_BNSD: Tensor,
        k_BNTD: Tensor,
        v_BNTD: Tensor,
        causal: bool,
        mask: ScoreBias | None,
    ) -> Tensor:
        """Returns the heads' results concatenated, [b, s, n d]. For mask see `added_to_scores`."""
        b, _, s, d = q_BNSD.shape
        seen = k_BNTD.shape[2]
        dropped = self.training and self.dropout > 0.0
        fits = self.fused and d * q_BNSD.element_size() <= kernel.MAX_HEAD_BYTES
        if isinstance(mask, ScoreParts) and not fits:
            mask = mask.sum(s, q_BNSD.dtype)
        if isinstance(mask, SharedBias):
            mask = mask.of_layer()
        causal = causal and mask is None and s > 1
        if mask is None and dropped and fits and library.available(q_BNSD.device, q_BNSD.dtype):
            mask = ScoreParts(None, None, causal)
        if isinstance(mask, ScoreParts):
            o_BNSD = self._fused(q_BNSD, k_BNTD, v_BNTD, mask)
            return o_BNSD.transpose(1, 2).reshape(b, s, -1)
        # The causal mask of PyTorch's fused kernel aligns the first query with the first key.
        if causal and (dropped or s < seen):
            mask, causal = _past(s, seen, q_BNSD.device), False
        if dropped:
            o_BNSD = self._unfused(q_BNSD, k_BNTD, v_BNTD, mask)
        else:
            o_BNSD = F.scaled_dot_product_attention(
                q_BNSD, k_BNTD, v_BNTD, mask, is_causal=causal, scale=self.scale
            )
        return o_BNSD.transpose(1, 2).reshape(b, s, -1)

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, parts: ScoreParts) -> Tensor:
        """Attention in a kernel that computes the same dropout mask as `_unfused`."""
        settings = kernel.Settings(parts.causal, self.scale)
        if self.training and self.dropout > 0.0:
            key = rng.key(self.clock.seed, self.clock.step, self.site)
            sample, head = self.clock.first_sample, self.head_block * q.shape[1]
            settings = kernel.Settings(parts.causal, self.scale, key, sample, head, self.dropout)
        return kernel.attention(q, k, v, parts.valid, parts.bias, settings)

    def _unfused(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attention with a dropout mask that is indexed globally, as PyTorch's kernels' is not."""
        b, n, s, _ = q.shape
        scores = q @ k.transpose(-1, -2) * self.scale
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        elif mask is not None:
            scores = scores + mask
        samples = indices(self.clock.first_sample, b, q).view(b, 1, 1)
        heads = indices(self.head_block * n, n, q).view(n, 1)
        rows = rng.join(samples, heads, indices(0, s, q))
        key = rng.key(self.clock.seed, self.clock.step, self.site)
        keep = rng.keep(key, rows, indices(0, k.shape[2], q), self.dropout)
        probabilities = torch.softmax(scores, -1) * keep / (1.0 - self.dropout)
        return probabilities.to(v.dtype) @ v


class Attention(_Heads):
    """Multi-head self-attention, [b, s, h] to [b, s, h].

    The columns of `qkv` are ordered [n, 3, d], so that a contiguous block of columns holds whole
    heads. They can then be sharded over any number of devices that divides n.
    """

    def __init__(
        self,
        qkv: Linear,
        out: Linear,
        head_dim: int,
        causal: bool,
        scaled: bool,
        dropout: float,
        site: str,
        clock: Clock,
    ) -> None:
        super().__init__(head_dim, scaled, dropout, site, clock)
        self.causal = causal
        self.qkv, self.out = qkv, out

    def forward(
        self,
        x_BSH: Tensor,
        mask: ScoreBias | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Attends from x [b, s, h] to itself, and to the tokens in `cache`, which it extends.

        Args:
            x_BSH: Input [b, s, h].
            mask: The result of `added_to_scores`, called with this module's `causal`.
            cache: Keys and values of past tokens, for generation.
        """
        q, k, v = _heads(self.qkv(x_BSH), 3, self.head_dim)
        if cache is not None:
            k, v = cache.append(k, v)
        found = self.recompute.attention(self._attend, q, k, v, self.causal, mask)
        out: Tensor = self.out(found)
        return out


class CrossAttention(_Heads):
    """Multi-head attention from a sequence to a source. Columns of `kv` are ordered [n, 2, d]."""

    def __init__(
        self,
        q: Linear,
        kv: Linear,
        out: Linear,
        head_dim: int,
        scaled: bool,
        dropout: float,
        site: str,
        clock: Clock,
    ) -> None:
        super().__init__(head_dim, scaled, dropout, site, clock)
        self.q, self.kv, self.out = q, kv, out

    def forward(
        self,
        x_BSH: Tensor,
        memory_BTH: Tensor,
        mask: ScoreBias | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Attends from x to the encoder's output.

        Args:
            x_BSH: Input [b, s, h].
            memory_BTH: The encoder's output [b, S, h]. With a cache it is read in the first call
                only.
            mask: The result of `added_to_scores` for the source's padding.
            cache: Where the source's keys and values are kept, for generation.
        """
        (q,) = _heads(self.q(x_BSH), 1, self.head_dim)
        if cache is not None and cache.source is not None:
            k, v = cache.source
        else:
            k, v = _heads(self.kv(memory_BTH), 2, self.head_dim)
        if cache is not None:
            cache.source = k, v
        found = self.recompute.attention(self._attend, q, k, v, False, mask)
        out: Tensor = self.out(found)
        return out


def _heads(x: Tensor, n_parts: int, head_dim: int) -> tuple[Tensor, ...]:
    """Splits [b, s, n * n_parts * d] into `n_parts` tensors [b, n, s, d]."""
    b, s, _ = x.shape
    return x.view(b, s, -1, n_parts, head_dim).permute(3, 0, 2, 1, 4).unbind(0)
