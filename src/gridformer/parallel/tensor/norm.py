"""LayerNorm and RMSNorm where h is sharded over the columns of a grid (Optimus)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gridformer import comm
from gridformer.mesh import Axes, Axis
from gridformer.models import blocks
from gridformer.parallel.sharding import ParamPlacement, shard_parameter

# Weight and bias are sharded over h, as activations are. Each row of the grid holds a copy and sees
# only b/r sequences, so the gradients of the copies are partial sums; row 0 owns the parameter. The
# paper broadcasts and reduces these vectors along the columns in every layer; here all of them
# travel once per step, in one message (gridformer.parallel.data.gradients).
VECTOR = ParamPlacement(cut=("col",), copies="row", partial=True)
VECTOR_OVER_ROWS = ParamPlacement(cut=("row",), copies="col", partial=True)  # stationary weights
LABEL = "norm"


class GridNorm(nn.Module):
    """LayerNorm or RMSNorm of x [b/r, s, h/c] over h: each row of devices sums its statistics.

    LayerNorm all-gathers the (mean, variance) of each token and combines them, which avoids the
    cancellation of E[x²]-E[x]², and all-reduces two sums per token in the backward pass. RMSNorm
    all-reduces one sum per token in each direction.

    With another `vector`, the axis that shards it takes the place of the columns.
    """

    def __init__(
        self,
        plain: blocks.LayerNorm | blocks.RMSNorm,
        axes: Axes,
        vector: ParamPlacement = VECTOR,
    ) -> None:
        super().__init__()
        self.eps, self.axis, self.weight = plain.eps, axes[str(vector.cut[0])], plain.weight
        self.scale = plain.scale if isinstance(plain, blocks.RMSNorm) else 1.0
        self.bias = plain.bias if isinstance(plain, blocks.LayerNorm) else None
        shard_vectors(self, axes, vector)

    def forward(self, x_BSH: Tensor) -> Tensor:
        weight = self.weight if self.scale == 1.0 else self.weight * self.scale
        return grid_norm(x_BSH, weight, self.bias, self.eps, self.axis)


def grid_norm(
    x_BSH: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float, axis: Axis
) -> Tensor:
    """Normalizes x [b, s, h/c] over h, which `axis` shards; RMSNorm if there is no bias."""
    y_BSH: Tensor = _GridNorm.apply(x_BSH, weight_H, bias_H, eps, axis)
    return y_BSH


def shard_vectors(norm: nn.Module, axes: Axes, vector: ParamPlacement = VECTOR) -> None:
    """Shards the weight and the bias of a norm over the columns, or as `vector` says."""
    for name, _ in list(norm.named_parameters()):
        shard_parameter(norm, name, vector, axes)


class _GridNorm(torch.autograd.Function):
    """Keeps x, which is the residual stream, and one or two numbers per token."""

    @staticmethod
    def forward(
        ctx: Any, x_BSH: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float, col: Axis
    ) -> Tensor:
        x = x_BSH.to(weight_H.dtype)
        ctx.col, ctx.h = col, x.shape[-1] * col.size
        if bias_H is None:
            squares = comm.all_reduce(x.square().sum(-1, keepdim=True), col, label=LABEL)
            rstd, shift = (squares / ctx.h + eps).rsqrt_(), None
            y = (x * rstd).mul_(weight_H)
        else:
            var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
            parts = comm.all_gather(torch.stack((mean, var))[None], col, 0, LABEL)
            # Chan, Golub, LeVeque 1979: mean of local variances plus variance of local means.
            var, mean = torch.var_mean(parts[:, 0], 0, correction=0)
            rstd = (parts[:, 1].mean(0) + var + eps).rsqrt_()
            shift = -mean * rstd
            y = torch.addcmul(bias_H, torch.addcmul(shift, x, rstd), weight_H)
        ctx.save_for_backward(x_BSH, weight_H, rstd, shift)
        return y.to(x_BSH.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x_BSH, weight_H, rstd, shift = ctx.saved_tensors
        grad, x = grads[0].to(weight_H.dtype), x_BSH.to(weight_H.dtype)
        normed = x * rstd if shift is None else torch.addcmul(shift, x, rstd)
        grad_normed = grad * weight_H
        terms = [(grad_normed * normed).sum(-1, keepdim=True)]
        if shift is not None:
            terms.append(grad_normed.sum(-1, keepdim=True))
        pending = comm.start_all_reduce(torch.stack(terms), ctx.col, label=LABEL)
        grad_weight = (grad * normed).flatten(0, -2).sum(0)
        grad_bias = None if shift is None else grad.flatten(0, -2).sum(0)
        sums = pending.wait().div_(ctx.h)
        grad_x = grad_normed.addcmul_(normed, sums[0], value=-1)
        if shift is not None:
            grad_x -= sums[1]
        return grad_x.mul_(rstd).to(x_BSH.dtype), grad_weight, grad_bias, None, None
