"""Triton kernels of the cross entropy: what a token's logits contribute, and their gradient."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gridformer.models.kernels.cross_entropy import empty_terms

_MOST = 4096  # columns of a tile


@triton.jit(do_not_specialize=["first", "n_words"])
def _terms(
    logits, targets, out, n_tokens, stride, first, n_words, share, spread, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    mine = logits + row * stride
    wide: tl.constexpr = tl.float64 if logits.dtype.element_ty == tl.float64 else tl.float32
    top, total, words = tl.full([], -float("inf"), wide), tl.zeros([], wide), tl.zeros([], wide)
    for start in range(0, n_words, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < n_words
        x = tl.load(mine + column, inside, -float("inf")).to(wide)
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        words += tl.sum(tl.where(inside, x, 0.0), 0)
        top = higher
    column = tl.load(targets + row) - first
    here = (column >= 0) & (column < n_words)
    target = tl.load(mine + column, here, 0.0).to(wide)
    tl.store(out + row, top)
    tl.store(out + n_tokens + row, total)
    tl.store(out + 2 * n_tokens + row, target * share + words * spread)


@triton.jit(do_not_specialize=["first", "n_words"])
def _gradient(
    logits, targets, norms, factors, n_columns, stride, first, n_words, share, spread,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = logits + row * stride + column
    x = tl.load(place, column < n_words, 0.0)
    norm = tl.load(norms + row)
    gradient = tl.exp(x.to(norm.dtype) - norm) - spread
    gradient -= tl.where(column == tl.load(targets + row) - first, share, 0.0)
    gradient = tl.where(column < n_words, gradient * tl.load(factors + row), 0.0)
    tl.store(place, gradient.to(x.dtype), column < n_columns)


def launch_terms(
    logits: Tensor, targets: Tensor, first: int, n_words: int, share: float, spread: float
) -> Tensor:
    """Computes `gridformer.models.kernels.cross_entropy.terms` on a GPU."""
    n_tokens, n_columns = logits.shape
    out = empty_terms(logits)
    columns = min(_MOST, triton.next_power_of_2(n_columns))
    if n_tokens:
        _terms[n_tokens,](
            logits, targets, out, n_tokens, logits.stride(0), first, n_words, share, spread,
            COLUMNS=columns, num_warps=8,
        )  # fmt: skip
    return out


def launch_gradient(
    logits: Tensor,
    targets: Tensor,
    norms: Tensor,
    factors: Tensor,
    first: int,
    n_words: int,
    share: float,
    spread: float,
) -> None:
    """Computes `gridformer.models.kernels.cross_entropy.write_gradient` on a GPU."""
    n_tokens, n_columns = logits.shape
    columns = min(_MOST, triton.next_power_of_2(n_columns))
    if n_tokens:
        _gradient[n_tokens, triton.cdiv(n_columns, columns)](
            logits, targets, norms, factors, n_columns, logits.stride(0), first, n_words,
            share, spread, COLUMNS=columns, num_warps=8,
        )  # fmt: skip
