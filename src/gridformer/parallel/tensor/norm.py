"""LayerNorm and RMSNorm where h is sharded over the columns of a grid (Optimus)."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from gridformer import comm
from gridformer.mesh import Axes, Axis
from gridformer.models import blocks
from gridformer.models.kernels.library import LIBRARY, define
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
        self.eps, self.weight = plain.eps, plain.weight
        self.line = line_of(axes[str(vector.cut[0])])
        self.scale = plain.scale if isinstance(plain, blocks.RMSNorm) else 1.0
        self.bias = plain.bias if isinstance(plain, blocks.LayerNorm) else None
        shard_vectors(self, axes, vector)

    def forward(self, x_BSH: Tensor) -> Tensor:
        weight = self.weight if self.scale == 1.0 else self.weight * self.scale
        return grid_norm(x_BSH, weight, self.bias, self.eps, self.line)


class Line(NamedTuple):
    """The axis that shards h, as compiled code knows it: by its size and a number."""

    size: int
    number: int


_AXES: WeakValueDictionary[int, Axis] = WeakValueDictionary()


def line_of(axis: Axis) -> Line:
    """Returns the `Line` of an axis, which norms on it share."""
    _AXES[id(axis)] = axis
    return Line(axis.size, id(axis))


def grid_norm(
    x_BSH: Tensor, weight_H: Tensor, bias_H: Tensor | None, eps: float, line: Line
) -> Tensor:
    """Normalizes x [b, s, h/c] over h, which `line` shards; RMSNorm if there is no bias."""
    y_BSH: Tensor = _GridNorm.apply(x_BSH, weight_H, bias_H, eps, *line)
    return y_BSH


def grid_rms_norm(x: Tensor, weight: Tensor, eps: float, line: Line) -> Tensor:
    """Normalizes x [.., h/c] over h as RMSNorm; see `grid_norm`."""
    return grid_norm(x, weight, None, eps, line)


def shard_vectors(norm: nn.Module, axes: Axes, vector: ParamPlacement = VECTOR) -> None:
    """Shards the weight and the bias of a norm over the columns, or as `vector` says."""
    for name, _ in list(norm.named_parameters()):
        shard_parameter(norm, name, vector, axes)


class _GridNorm(torch.autograd.Function):
    """Keeps x, which is the residual stream, and one or two numbers per token."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BSH: Tensor,
        weight_H: Tensor,
        bias_H: Tensor | None,
        eps: float,
        size: int,
        number: int,
    ) -> Tensor:
        x, compiles, ops = x_BSH.to(weight_H.dtype), torch.compiler.is_compiling(), torch.ops
        ctx.number, ctx.h = number, x.shape[-1] * size
        if bias_H is None:
            squares = x.square().sum(-1, keepdim=True)
            if compiles:
                squares = ops.gridformer.norm_sum(squares, number)
            else:
                squares = comm.all_reduce(squares, _AXES[number], label=LABEL)
            rstd, shift = (squares / ctx.h + eps).rsqrt_(), None
            y = x * rstd
            y = y * weight_H if compiles else y.mul_(weight_H)  # see gridformer.models.blocks.norm
        else:
            var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
            parts = torch.stack((mean, var))[None]
            if compiles:
                parts = ops.gridformer.norm_gather(parts, size, number)
            else:
                parts = comm.all_gather(parts, _AXES[number], 0, LABEL)
            # Chan, Golub, LeVeque 1979: mean of local variances plus variance of local means.
            var, mean = torch.var_mean(parts[:, 0], 0, correction=0)
            rstd = (parts[:, 1].mean(0) + var + eps).rsqrt_()
            shift = -mean * rstd
            y = torch.addcmul(bias_H, torch.addcmul(shift, x, rstd), weight_H)
        ctx.save_for_backward(x_BSH, weight_H, rstd, shift)
        return y if y.dtype == x_BSH.dtype else y.to(x_BSH.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x_BSH, weight_H, rstd, shift = ctx.saved_tensors
        grad, x = grads[0].to(weight_H.dtype), x_BSH.to(weight_H.dtype)
        normed = x * rstd if shift is None else torch.addcmul(shift, x, rstd)
        grad_normed = grad * weight_H
        terms = [(grad_normed * normed).sum(-1, keepdim=True)]
        if shift is not None:
            terms.append(grad_normed.sum(-1, keepdim=True))
        sums = torch.stack(terms)
        if torch.compiler.is_compiling():
            pending = comm.Pending(torch.ops.gridformer.norm_sum(sums, ctx.number))
        else:
            pending = comm.start_all_reduce(sums, _AXES[ctx.number], label=LABEL)
        grad_weight = (grad * normed).flatten(0, -2).sum(0)
        grad_bias = None if shift is None else grad.flatten(0, -2).sum(0)
        sums = pending.wait().div_(ctx.h)
        # In compiled code `addcmul_` is a product and a sum, which rounds otherwise.
        addcmul = torch.addcmul if torch.compiler.is_compiling() else Tensor.addcmul_
        grad_x = addcmul(grad_normed, normed, sums[0], value=-1)
        if shift is not None:
            grad_x -= sums[1]
        return grad_x.mul_(rstd).to(x_BSH.dtype), grad_weight, grad_bias, None, None, None


# --------------------------------------------------------------------------- messages

# Compiled code calls these messages as operators, which it does not trace.
define("norm_sum(Tensor x, int axis) -> Tensor")
define("norm_gather(Tensor x, int size, int axis) -> Tensor")


@torch.library.impl(LIBRARY, "norm_sum", "CompositeExplicitAutograd")
def _(x: Tensor, axis: int) -> Tensor:
    return comm.all_reduce(x.clone(), _AXES[axis], label=LABEL)


@torch.library.impl(LIBRARY, "norm_gather", "CompositeExplicitAutograd")
def _(x: Tensor, size: int, axis: int) -> Tensor:
    gathered = comm.all_gather(x, _AXES[axis], 0, LABEL)
    return gathered.clone() if size == 1 else gathered


@torch.library.register_fake("gridformer::norm_sum", lib=LIBRARY)
def _(x: Tensor, axis: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.register_fake("gridformer::norm_gather", lib=LIBRARY)
def _(x: Tensor, size: int, axis: int) -> Tensor:
    return x.new_empty((size * x.shape[0], *x.shape[1:]))
