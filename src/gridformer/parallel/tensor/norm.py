"""LayerNorm and RMSNorm where h is sharded over the columns of a grid (Optimus)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gridformer import comm
from gridformer.mesh import Axes
from gridformer.models import blocks
from gridformer.parallel.sharding import ParamPlacement, shard_parameter
from gridformer.parallel.tensor import summa

# Weight and bias are sharded over h, as activations are. Each row of the grid holds a copy and sees
# only b/r sequences, so the gradients of the copies are partial sums; row 0 owns the parameter. The
# paper broadcasts and reduces these vectors along the columns in every layer; here all of them
# travel once per step, in one message (gridformer.parallel.data.gradients).
VECTOR = ParamPlacement(cut=("col",), copies="row", partial=True)
LABEL = "norm"


class DeferredNorm(nn.Module):
    """A norm that the next product computes, because that product gathers whole rows anyway.

    It returns its input x [b/r, s, h/c] with the norm's parameters and computes nothing itself.
    Weight and bias [h] are replicated on all devices of the grid.
    """

    PLACE = ParamPlacement(cut=(None,), copies="grid", partial=True)

    def __init__(self, plain: blocks.LayerNorm | blocks.RMSNorm, axes: Axes) -> None:
        super().__init__()
        self.eps, self.weight = plain.eps, plain.weight
        self.scale = plain.scale if isinstance(plain, blocks.RMSNorm) else 1.0
        shard_parameter(self, "weight", self.PLACE, axes)
        self.bias: nn.Parameter | None = None
        if isinstance(plain, blocks.LayerNorm):
            self.bias = plain.bias
            shard_parameter(self, "bias", self.PLACE, axes)

    def forward(self, x_BSH: Tensor) -> summa.Normed:
        weight = self.weight if self.scale == 1.0 else self.weight * self.scale
        return summa.Normed(x_BSH, summa.Norm(weight, self.bias, self.eps))


class GridLayerNorm(nn.Module):
    """LayerNorm of x [b/r, s, h/c] over h, which is sharded over columns.

    Forward, each row of devices all-gathers the local (mean, variance) of every token and combines
    them, which avoids the cancellation of E[x²]-E[x]². Backward, it all-reduces two sums per token.
    """

    def __init__(self, plain: blocks.LayerNorm, axes: Axes) -> None:
        super().__init__()
        self.eps, self.axes = plain.eps, axes
        self.weight, self.bias = plain.weight, plain.bias
        shard_parameter(self, "weight", VECTOR, axes)
        shard_parameter(self, "bias", VECTOR, axes)

    def forward(self, x_BSH: Tensor) -> Tensor:
        y_BSH: Tensor = _GridLayerNorm.apply(x_BSH, self.weight, self.bias, self.eps, self.axes)
        return y_BSH


class _GridLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BSH: Tensor, weight_H: Tensor, bias_H: Tensor, eps: float, axes: Axes
    ) -> Tensor:
        x = x_BSH.to(weight_H.dtype)
        width = x.shape[-1]
        var, mean = torch.var_mean(x, -1, correction=0)
        parts = comm.all_gather(torch.stack((mean, var))[None], axes.col, 0, LABEL)
        # Chan, Golub, LeVeque 1979: mean of the local variances plus variance of the local means.
        mean = parts[:, 0].mean(0)
        var = parts[:, 1].mean(0) + (parts[:, 0] - mean).square().mean(0)
        rstd = torch.rsqrt(var + eps).unsqueeze(-1)
        normed = (x - mean.unsqueeze(-1)).mul_(rstd)
        ctx.save_for_backward(normed, rstd, weight_H)
        ctx.axes, ctx.h, ctx.dtype = axes, width * axes.col.size, x_BSH.dtype
        return torch.addcmul(bias_H, normed, weight_H).to(x_BSH.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        normed, rstd, weight_H = ctx.saved_tensors
        grad = grads[0].to(normed.dtype)
        grad_normed = grad * weight_H
        sums = torch.stack((grad_normed.sum(-1), (grad_normed * normed).sum(-1)))
        sums = comm.all_reduce(sums, ctx.axes.col, label=LABEL).div_(ctx.h).unsqueeze(-1)
        grad_x = (grad_normed - sums[0] - normed * sums[1]).mul_(rstd)
        tokens = tuple(range(grad.dim() - 1))
        grad_weight, grad_bias = (grad * normed).sum(tokens), grad.sum(tokens)
        return grad_x.to(ctx.dtype), grad_weight, grad_bias, None, None


class GridRMSNorm(nn.Module):
    """RMSNorm of x [b/r, s, h/c] over h, which is sharded over columns.

    One sum per token is all-reduced in each direction.
    """

    def __init__(self, plain: blocks.RMSNorm, axes: Axes) -> None:
        super().__init__()
        self.eps, self.scale, self.axes = plain.eps, plain.scale, axes
        self.weight = plain.weight
        shard_parameter(self, "weight", VECTOR, axes)

    def forward(self, x_BSH: Tensor) -> Tensor:
        weight = self.weight if self.scale == 1.0 else self.weight * self.scale
        y_BSH: Tensor = _GridRMSNorm.apply(x_BSH, weight, self.eps, self.axes)
        return y_BSH


class _GridRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSH: Tensor, weight_H: Tensor, eps: float, axes: Axes) -> Tensor:
        x = x_BSH.to(weight_H.dtype)
        h = x.shape[-1] * axes.col.size
        squares = comm.all_reduce(x.square().sum(-1, keepdim=True), axes.col, label=LABEL)
        rstd = torch.rsqrt(squares / h + eps)
        normed = x * rstd
        ctx.save_for_backward(normed, rstd, weight_H)
        ctx.axes, ctx.h, ctx.dtype = axes, h, x_BSH.dtype
        return (normed * weight_H).to(x_BSH.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        normed, rstd, weight_H = ctx.saved_tensors
        grad = grads[0].to(normed.dtype)
        sums = (grad * weight_H * normed).sum(-1, keepdim=True)
        mean = comm.all_reduce(sums, ctx.axes.col, label=LABEL) / ctx.h
        grad_x, grad_weight = summa.rms_norm_backward(grad, normed, weight_H, rstd, mean)
        return grad_x.to(ctx.dtype), grad_weight, None, None


def grid_norm(plain: blocks.LayerNorm | blocks.RMSNorm, axes: Axes) -> nn.Module:
    """Returns the sharded form of a norm, which all-reduces its sums along each row of devices."""
    if isinstance(plain, blocks.RMSNorm):
        return GridRMSNorm(plain, axes)
    return GridLayerNorm(plain, axes)
