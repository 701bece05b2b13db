"""Attention within documents where no kernel of gridformer runs.

A mask of all queries and keys takes s x S numbers for each sequence. So the mask is made for some
queries at a time, in the forward pass and again in the backward pass; if attention is causal, keys
after these queries are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gridformer.models.kernels.attention import empty_heads

QUERIES = 256  # for which a part of the mask is made at a time


@dataclass(frozen=True)
class DocumentMask:
    """A mask of attention whose parts are made when they are needed.

    Attributes:
        bounds: Where the documents of queries lie; see `DocumentBounds.of_queries`.
        keys: The number S of keys.
        causal: Whether a query sees only keys up to its own position.
        window: How many keys a query sees at most if `causal`; 0 means all of its document.
        dtype: The dtype of what is added to scores.
    """

    bounds: Tensor
    keys: int
    causal: bool
    window: int
    dtype: torch.dtype

    def whole(self) -> Tensor:
        """Returns what is added to all scores [b, 1, s, S]."""
        return self.part(slice(0, self.bounds.shape[-1]), slice(0, self.keys))

    def parts(self) -> Iterator[tuple[slice, slice]]:
        """Yields slices of queries in order, each with the slice of all keys that they may see."""
        s = self.bounds.shape[-1]
        for first in range(0, s, QUERIES):
            after = min(first + QUERIES, s)
            begin = max(0, first - self.window + 1) if self.window else 0
            yield slice(first, after), slice(begin, after if self.causal else self.keys)

    def part(self, queries: slice, keys: slice) -> Tensor:
        """Returns what is added to the scores of some queries and keys, [b, 1, queries, keys]."""
        device = self.bounds.device
        key = torch.arange(keys.start, keys.stop, device=device)
        first, after = self.bounds[:, :, queries, None].unbind(1)
        seen = (key >= first) & (key < after)
        if self.causal:
            query = torch.arange(queries.start, queries.stop, device=device)[:, None]
            seen &= key <= query
            if self.window:
                seen &= key > query - self.window
        return torch.where(seen, 0.0, -torch.inf).to(self.dtype).unsqueeze(1)


def attention_in_parts(q: Tensor, k: Tensor, v: Tensor, mask: DocumentMask, scale: float) -> Tensor:
    """Computes attention from q [b, n, s, d] to k and v [b, m, S, d], where m divides n.

    Args:
        q: Queries [b, n, s, d].
        k: Keys [b, m, S, d]; n / m heads of queries in a row share one head of keys.
        v: Values [b, m, S, d].
        mask: Which keys each query sees.
        scale: A factor of the scores.

    Returns:
        [b, n, s, d], in memory [b, s, n, d].
    """
    out: Tensor = _InParts.apply(q, k, v, mask, scale)
    return out


class _InParts(torch.autograd.Function):
    """Saves only its inputs; the backward pass computes the scores again."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: DocumentMask, scale: float
    ) -> Tensor:
        out = empty_heads(q)
        for queries, keys in mask.parts():
            found = (q[:, :, queries], k[:, :, keys], v[:, :, keys])
            out[:, :, queries] = _attend(*found, mask.part(queries, keys), scale)
        ctx.save_for_backward(q, k, v)
        ctx.mask, ctx.scale = mask, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v = ctx.saved_tensors
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for queries, keys in ctx.mask.parts():
            found = (q[:, :, queries], k[:, :, keys], v[:, :, keys])
            some = [x.detach().requires_grad_() for x in found]
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
