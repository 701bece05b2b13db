"""Products of sorted rows with one matrix for each group of them, as experts compute them.

On GPUs that is one kernel for all groups, elsewhere one product a group. Sizes of groups are data
on the device: `ends` holds where each group ends, int32 [E].
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gridformer.models.kernels.library import LIBRARY, define

define("grouped_product(Tensor x, Tensor w, Tensor ends) -> Tensor")
define("grouped_sum(Tensor x, Tensor y, Tensor ends) -> Tensor")


def grouped_product(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Returns x[i] w[e] [S, N] of rows x [S, K] in groups e and matrices w [E, K, N]."""
    y: Tensor = _GroupedProduct.apply(x, w, ends)
    return y


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, ends)
        y: Tensor = torch.ops.gridformer.grouped_product(x, w, ends)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, w, ends = ctx.saved_tensors
        grad, (grad_x, grad_w) = grads[0].contiguous(), (None, None)
        if ctx.needs_input_grad[0]:
            grad_x = torch.ops.gridformer.grouped_product(grad, w.transpose(1, 2), ends)
        if ctx.needs_input_grad[1]:
            if w.stride(1) == 1:  # a transpose, as its gradient is then
                grad_w = torch.ops.gridformer.grouped_sum(grad, x, ends).transpose(1, 2)
            else:
                grad_w = torch.ops.gridformer.grouped_sum(x, grad, ends)
        return grad_x, grad_w, None


def _in_one_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16


@torch.library.impl(LIBRARY, "grouped_product", "CompositeExplicitAutograd")
def _(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    if _in_one_kernel(x):
        return F.grouped_mm(x, w, offs=ends)
    y, start = x.new_empty(len(x), w.shape[2]), 0
    for e, end in enumerate(ends.tolist()):
        torch.mm(x[start:end], w[e], out=y[start:end])
        start = end
    return y


@torch.library.register_fake("gridformer::grouped_product", lib=LIBRARY)
def _(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(len(x), w.shape[2])


@torch.library.impl(LIBRARY, "grouped_sum", "CompositeExplicitAutograd")
def _(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """The sum over rows of x [S, K] and y [S, N] of each group: [E, K, N]."""
    if _in_one_kernel(x):
        return F.grouped_mm(x.t(), y, offs=ends)
    total, start = x.new_empty(len(ends), x.shape[1], y.shape[1]), 0
    for e, end in enumerate(ends.tolist()):
        torch.mm(x[start:end].t(), y[start:end], out=total[e])
        start = end
    return total


@torch.library.register_fake("gridformer::grouped_sum", lib=LIBRARY)
def _(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(len(ends), x.shape[1], y.shape[1])
