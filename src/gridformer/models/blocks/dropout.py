"""Dropout whose masks do not depend on the layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gridformer.models.blocks.clock import Site
from gridformer.models.kernels import dropout as kernel
from gridformer.models.kernels import library
from gridformer.models.kernels.library import LIBRARY, define
from gridformer.utils import rng
from gridformer.utils.tensors import loop


class Dropout(Site):
    """Dropout whose mask is a function of (seed, step, site, global element index).

    The input is [b, s, h] or a block of it; `block` holds the indices along s and along h of the
    block on this device. With `fused` a GPU computes mask and product in one kernel.
    """

    block = (0, 0)

    def forward(self, x_BSH: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x_BSH
        _, s, h = x_BSH.shape
        token, column = self.block[0] * s, self.block[1] * h
        fused = self.fused and library.available(x_BSH.device, x_BSH.dtype)
        stamp = self.stamp(x_BSH.device)
        out: Tensor = _Masked.apply(x_BSH, stamp, token, column, self.p, fused)
        return out


class _Masked(torch.autograd.Function):
    """Multiplies x by a mask, which backward generates again, so that nothing is saved.

    A block that ends in dropout therefore does not need the output of its last product in backward,
    and recomputation can stop before it.
    """

    @staticmethod
    def forward(
        ctx: Any, x_BSH: Tensor, stamp: Tensor, token: int, column: int, p: float, fused: bool
    ) -> Tensor:
        # Recomputation would run until the stamp is saved; a compiled block is run as a whole.
        ctx.stamp = None if torch.compiler.is_compiling() else stamp
        if torch.compiler.is_compiling():
            ctx.save_for_backward(stamp)
        ctx.rest = token, column, p, fused
        return _masked(x_BSH, stamp, token, column, p, fused)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (stamp,) = ctx.saved_tensors or (ctx.stamp,)
        return _masked(grads[0], stamp, *ctx.rest), None, None, None, None, None


def _masked(x: Tensor, stamp: Tensor, token: int, column: int, p: float, fused: bool) -> Tensor:
    if fused:
        return kernel.masked(x, stamp, token, column, p)
    if torch.compiler.is_compiling():
        out: Tensor = torch.ops.gridformer.masked_unfused(x, stamp, token, column, p)
        return out
    return drop_elements(x, stamp, token, column, p)


def drop_elements(x_BSH: Tensor, stamp: Tensor, token: int, column: int, p: float) -> Tensor:
    """Zeroes elements of x with probability p and multiplies the others by 1 / (1 - p).

    Args:
        x_BSH: Activations [b, s, h].
        stamp: The stamp of the site, see `DropoutClock`.
        token: The index of the first token within its sequence.
        column: The index of the first column.
        p: The probability of zeroing an element, below 1.

    Returns:
        [b, s, h], contiguous.
    """
    b, s, h = x_BSH.shape
    low, high, first_sample, _ = stamp.unbind()
    # Runs on some rows at a time: the random integers take several times the memory of x.
    samples = (indices(0, b, x_BSH) + first_sample).view(b, 1)
    rows = rng.hash_indices(samples, indices(token, s, x_BSH)).view(-1)
    columns = indices(column, h, x_BSH)
    flat = x_BSH.reshape(-1, h)
    out = torch.empty_like(flat, memory_format=torch.contiguous_format)
    n_rows = max(1, _CHUNK_ELEMENTS[x_BSH.is_cuda] // h)
    for some in loop([slice(i, i + n_rows) for i in range(0, len(flat), n_rows)]):
        torch.mul(flat[some], rng.keep((low, high), rows[some], columns, p), out=out[some])
    return out.mul_(1.0 / (1.0 - p)).view_as(x_BSH)


# Elements per chunk, by whether the tensor is on a GPU: there each chunk costs kernel launches.
_CHUNK_ELEMENTS = {False: 1 << 18, True: 1 << 24}


def keep_scores(
    stamp: Tensor, shape: tuple[int, int, int, int], first_head: int, p: float
) -> Tensor:
    """Returns which attention probabilities dropout keeps, bool [b, n, s, S].

    Args:
        stamp: The stamp of the site, see `DropoutClock`.
        shape: b, n, s, S.
        first_head: The global index of the first head.
        p: The probability of dropping one.
    """
    if torch.compiler.is_compiling():
        out: Tensor = torch.ops.gridformer.keep_scores(stamp, shape, first_head, p)
        return out
    return _keep_scores(stamp, shape, first_head, p)


def _keep_scores(stamp: Tensor, shape: Sequence[int], first_head: int, p: float) -> Tensor:
    b, n, s, seen = shape
    low, high, first_sample, _ = stamp.unbind()
    samples = (indices(0, b, stamp) + first_sample).view(b, 1, 1)
    heads = indices(first_head, n, stamp).view(n, 1)
    rows = rng.hash_indices(samples, heads, indices(0, s, stamp))
    return rng.keep((low, high), rows, indices(0, seen, stamp), p)


def indices(start: int, n: int, like: Tensor) -> Tensor:
    """Returns the n integers from `start` on, on the device of `like`.

    Args:
        start: The first integer.
        n: How many there are.
        like: A tensor on the device of the result.

    Returns:
        int64 [n].
    """
    return torch.arange(start, start + n, device=like.device)


# Compiled code calls the two functions as operators, which the compiler does not trace: it then
# gives the same bits as uncompiled code, and does not keep 64-bit random integers for the backward
# pass.
define("masked_unfused(Tensor x, Tensor stamp, int token, int column, float p) -> Tensor")
define("keep_scores(Tensor stamp, int[] shape, int first_head, float p) -> Tensor")
torch.library.impl(LIBRARY, "masked_unfused", "CompositeExplicitAutograd")(drop_elements)
torch.library.impl(LIBRARY, "keep_scores", "CompositeExplicitAutograd")(_keep_scores)


@torch.library.register_fake("gridformer::masked_unfused", lib=LIBRARY)
def _(x: Tensor, stamp: Tensor, token: int, column: int, p: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("gridformer::keep_scores", lib=LIBRARY)
def _(stamp: Tensor, shape: Sequence[int], first_head: int, p: float) -> Tensor:
    return stamp.new_empty(shape, dtype=torch.bool)
