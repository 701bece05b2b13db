"""Terms that are added to attention scores: masks of padding and windows, and learned biases."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridformer.models.blocks.linear import Init, new_parameter
from gridformer.models.kernels import library
from gridformer.models.kernels.attention import empty_heads

QUERIES = 256  # for which a part of a `MaskInParts` is made at a time


class PaddingMask(nn.Module):
    """Turns valid [b, s], False for padding, into a mask of attention scores [b, 1, 1, s]."""

    def forward(self, valid_BS: Tensor) -> Tensor:
        return valid_BS[:, None, None, :]


class AttendingRows(nn.Module):
    """Returns a tensor of the batch [b, s] for the rows that attention computes: the same ones."""

    def forward(self, x_BS: Tensor) -> Tensor:
        return x_BS


class DocumentBounds(NamedTuple):
    """Where the documents of queries and keys lie. In self-attention both tensors are the same.

    Attributes:
        of_queries: The first key of each query's document, and the one after its last,
            int32 [b, 2, s].
        of_keys: The first query of each key's document, and the one after its last,
            int32 [b, 2, S].
    """

    of_queries: Tensor
    of_keys: Tensor


def document_bounds(documents_BS: Tensor, of_keys_BT: Tensor | None = None) -> DocumentBounds:
    """Returns where the documents of queries and keys lie, within which a query attends.

    The numbers of documents, int64 [b, s] and [b, S], ascend in each row. Without those of keys,
    keys are at the positions of the queries.
    """
    if of_keys_BT is None:
        same = _places_of(documents_BS, documents_BS)
        return DocumentBounds(same, same)
    return DocumentBounds(
        _places_of(documents_BS, of_keys_BT), _places_of(of_keys_BT, documents_BS)
    )


def _places_of(documents: Tensor, others: Tensor) -> Tensor:
    """Returns where each number [b, n] is in a row of ascending numbers [b, m], int32 [b, 2, n]."""
    row, x = others.contiguous(), documents.contiguous()
    sides = (torch.searchsorted(row, x, out_int32=True, right=after) for after in (False, True))
    return torch.stack([*sides], 1)


class RelativeBias(nn.Module):
    """A learned bias of scores per head and bucket of distances (Raffel et al. 2020, section 2.1).

    Half of the buckets hold one distance each; the others hold logarithmically wider ranges up to
    `furthest`, from which on all keys share the last bucket.

    With `both_ways`, queries also see later keys, and each direction has half of the buckets.
    """

    def __init__(self, buckets: int, furthest: int, n: int, both_ways: bool, std: float) -> None:
        super().__init__()
        self.furthest, self.both_ways = furthest, both_ways
        self.weight = new_parameter(buckets, n, init=Init(std=std))

    def forward(self, queries: int, keys: int, first_query: int | None = None) -> Tensor:
        """Returns the bias [n, queries, keys] of some of `keys` positions, by default the last."""
        first = keys - queries if first_query is None else first_query
        place = torch.arange(keys, device=self.weight.device)
        distance = place - place[first : first + queries, None]  # of a key from a query
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
class MaskInParts:
    """A mask of positions and documents where no kernel runs, made for some queries at a time.

    The mask of all queries and keys would take s x S numbers for each sequence.

    Attributes:
        causal: Whether a query sees only keys up to its own position. The last query and the last
            key are at the same position.
        window: How many keys a query sees at most if `causal`; 0 means all of its document.
        bounds: `DocumentBounds.of_queries`, if queries do not leave their documents.
    """

    queries: int
    keys: int
    causal: bool
    window: int
    dtype: torch.dtype
    device: torch.device
    bounds: Tensor | None = None

    def whole(self) -> Tensor:
        """Returns what is added to all scores, [b, 1, s, S] or [1, 1, s, S]."""
        return self.part(slice(0, self.queries), slice(0, self.keys))

    def parts(self) -> Iterator[tuple[slice, slice]]:
        """Yields slices of queries in order, each with the slice of all keys that they may see."""
        before = self.keys - self.queries  # keys before the first query, if causal
        for first in range(0, self.queries, QUERIES):
            after = min(first + QUERIES, self.queries)
            begin = max(0, before + first - self.window + 1) if self.window else 0
            yield slice(first, after), slice(begin, before + after if self.causal else self.keys)

    def part(self, queries: slice, keys: slice) -> Tensor:
        """Returns what is added to some scores, [b or 1, 1, queries, keys]."""
        key = torch.arange(keys.start, keys.stop, device=self.device)[None, None]
        query = torch.arange(queries.start, queries.stop, device=self.device)[:, None]
        query = query + (self.keys - self.queries)
        seen = key <= query if self.causal else torch.ones_like(key, dtype=torch.bool)
        if self.window:
            seen = seen & (key > query - self.window)
        if self.bounds is not None:
            first, after = self.bounds[:, :, queries, None].unbind(1)
            seen = seen & (key >= first) & (key < after)
        return torch.where(seen, 0.0, -torch.inf).to(self.dtype).unsqueeze(1)


def attention_in_parts(q: Tensor, k: Tensor, v: Tensor, mask: MaskInParts, scale: float) -> Tensor:
    """Computes attention from q [b, n, s, d] to k and v [b, m, S, d], where m divides n.

    The result [b, n, s, d] lies in memory as [b, s, n, d].
    """
    out: Tensor = _InParts.apply(q, k, v, mask, scale)
    return out


class _InParts(torch.autograd.Function):
    """Saves only its inputs; the backward pass computes the scores again."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: MaskInParts, scale: float
    ) -> Tensor:
        out = empty_heads(q)
        for queries, keys in mask.parts():
            some = (q[:, :, queries], k[:, :, keys], v[:, :, keys])
            out[:, :, queries] = _attend(*some, mask.part(queries, keys), scale)
        ctx.save_for_backward(q, k, v)
        ctx.mask, ctx.scale = mask, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v = ctx.saved_tensors
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for queries, keys in ctx.mask.parts():
            views = (q[:, :, queries], k[:, :, keys], v[:, :, keys])
            some = [x.detach().requires_grad_() for x in views]
            part = ctx.mask.part(queries, keys)
            with torch.enable_grad():
                out = _attend(some[0], some[1], some[2], part, ctx.scale)
            of_q, of_k, of_v = torch.autograd.grad(out, some, grads[0][:, :, queries])
            grad_q[:, :, queries] = of_q
            grad_k[:, :, keys] += of_k
            grad_v[:, :, keys] += of_v
        return grad_q, grad_k, grad_v, None, None


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    shared = {"enable_gqa": True} if k.shape[1] < q.shape[1] else {}
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, **shared)


@dataclass(frozen=True)
class SharedBias:
    """A learned bias of scores that all layers of a stack read in bfloat16 or float16.

    Its memory is shared, and the gradients of the layers are added up in float32, for `bias`
    [n, s, S]. `values` are what is added to scores; `mask` says where a key may be attended to.
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
class Window:
    """A sliding window of causal attention (Jiang et al. 2023, section 2).

    Attributes:
        size: A query attends to the key at its own position and to size - 1 keys before it.
    """

    size: int
    keys: int
    device: torch.device


@dataclass(frozen=True)
class ScoreParts:
    """The terms that `gridformer.models.kernels` adds to scores, which are smaller than their sum.

    `valid` [b, S] is False where no query may attend to a key, and `bias` is [n, s, S].
    """

    valid: Tensor | None
    bias: Tensor | None
    causal: bool
    window: Window | None = None
    documents: DocumentBounds | None = None

    def sum(self, queries: int, dtype: torch.dtype) -> Tensor | SharedBias | MaskInParts | None:
        """Returns the sum as one tensor, for attention that the kernels cannot compute."""
        mask = None if self.valid is None else self.valid[:, None, None, :]
        out = added_to_scores(
            queries, dtype, mask, self.bias, self.causal, False, self.window, self.documents
        )
        assert not isinstance(out, ScoreParts)
        return out


ScoreBias = Tensor | SharedBias | ScoreParts | MaskInParts  # what `added_to_scores` returns


def added_to_scores(
    queries: int,
    dtype: torch.dtype,
    mask: Tensor | None = None,
    bias_NST: Tensor | None = None,
    causal: bool = False,
    fused: bool = False,
    window: Window | None = None,
    documents: DocumentBounds | None = None,
) -> ScoreBias | None:
    """Builds what all layers of a stack add to their scores, so that it exists once.

    Args:
        mask: True where a key may be attended to [b, 1, 1, S]; see `PaddingMask`.
        causal: Whether a query attends only to keys up to its own position. The last query and the
            last key are at the same position.
        fused: Whether attention may use the kernels of `gridformer.models.kernels`.
        documents: The bounds of documents, which a query does not leave; see `document_bounds`.

    Returns:
        [b or 1, n or 1, queries or 1, S], as a `SharedBias` if it needs gradients in another dtype;
        or the parts of that where a kernel takes them. A `MaskInParts` for `documents` and `window`
        alone in long sequences. None without `mask`, `bias_NST` and `documents` if no window hides
        a key: attention applies causality by itself.
    """
    if window is not None and mask is None and window.size >= window.keys:
        window = None  # with padding it decides what padded queries see, see below
    which = bias_NST if mask is None else mask
    if which is not None:
        seen, device = which.shape[-1], which.device
    elif documents is not None:
        seen, device = documents.of_keys.shape[-1], documents.of_keys.device
    elif window is not None:
        seen, device = window.keys, window.device
    else:
        return None
    if fused and library.available(device, dtype):
        valid = None if mask is None else mask[:, 0, 0, :]
        bias = None if bias_NST is None else bias_NST.contiguous()
        return ScoreParts(valid, bias, causal, window, documents)
    if mask is None and bias_NST is None and queries > QUERIES:
        size, bounds = window.size if window else 0, documents.of_queries if documents else None
        return MaskInParts(queries, seen, causal, size, dtype, device, bounds)
    if causal and (queries > 1 or window is not None):
        near = past(queries, seen, device, None if window is None else window.size)
        mask = near if mask is None else mask & near
        if window is not None:
            # All keys in the window of a padded query may be padding. It sees itself, because
            # attention to nothing is not a number, and so are gradients that pass through it.
            mask = mask | past(queries, seen, device, 1)
    if documents is not None:
        within = same_document(documents.of_queries, seen, causal)
        mask = within if mask is None else mask & within
    if bias_NST is None:
        assert mask is not None
        return torch.where(mask, 0.0, -torch.inf).to(dtype)
    bias = bias_NST.to(dtype).unsqueeze(0)
    if bias_NST.dtype != dtype and bias.requires_grad:
        bias = bias.detach()
        values = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
        return SharedBias(bias_NST, values, mask)
    return bias if mask is None else bias.masked_fill(~mask, -torch.inf)


def same_document(bounds: Tensor, keys: int, causal: bool) -> Tensor:
    """Returns a mask [b, 1, s, S]: True where a key is in the document of the query.

    If attention is `causal`, another mask hides all later keys, and this one need not.
    """
    key = torch.arange(keys, dtype=bounds.dtype, device=bounds.device)
    first, after = bounds.unsqueeze(-1).unbind(1)
    mask = key >= first if causal else (key >= first) & (key < after)
    return mask.unsqueeze(1)


def past(queries: int, seen: int, device: torch.device, size: int | None = None) -> Tensor:
    """Returns a mask that is True where a key is not after the query's position.

    `size` limits the keys that a query sees, of which its own position is the last.
    """
    mask = torch.ones(queries, seen, dtype=torch.bool, device=device).tril(seen - queries)
    return mask if size is None else mask.triu(seen - queries - size + 1)
