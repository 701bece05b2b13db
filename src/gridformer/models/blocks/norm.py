"""Normalization over h, computed in the dtype of the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridformer.models.blocks.linear import Init, new_parameter

NormKind = Literal["layer", "rms"]


class LayerNorm(nn.Module):
    """Computes (x - mean) / std * weight + bias over h for x [b, s, h].

    `reader` is the name of the product that alone reads the result, or None if others read it too.
    """

    def __init__(self, h: int, eps: float, reader: str | None = None) -> None:
        super().__init__()
        self.eps, self.reader = eps, reader
        self.weight = new_parameter(h, init=Init(mean=1.0))
        self.bias = new_parameter(h, init=Init())

    def forward(self, x_BSH: Tensor) -> Tensor:
        if x_BSH.dtype == self.weight.dtype:
            return F.layer_norm(x_BSH, x_BSH.shape[-1:], self.weight, self.bias, self.eps)
        y: Tensor = _LayerNorm.apply(x_BSH, self.weight, self.bias, self.eps)
        return y


class _LayerNorm(torch.autograd.Function):
    """Keeps x in its own type, as compiled code does, and two numbers per token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        wide, shape = x.to(weight.dtype), x.shape[-1:]
        out, mean, rstd = torch.native_layer_norm(wide, shape, weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, mean, rstd, weight, bias = ctx.saved_tensors
        grad, wide = (y.to(weight.dtype) for y in (grads[0], x))
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
            grad, wide, x.shape[-1:], mean, rstd, weight, bias, [True] * 3
        )
        return grad_x.to(x.dtype), grad_weight, grad_bias, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / sqrt(mean(x²) + eps) * weight over the last dimension, in the dtype of x."""
    y: Tensor = _RMSNorm.apply(x, weight, eps)
    return y


class _RMSNorm(torch.autograd.Function):
    """Keeps x, which is the residual stream, and one number per token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(weight.dtype)
        rstd = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, rstd, weight)
        normed = wide * rstd
        # Code that torch 2.11 compiles loses the gradients of a function which returns what it has
        # changed in place, or cast to the type that it has already.
        out = normed * weight if torch.compiler.is_compiling() else normed.mul_(weight)
        return out if out.dtype == x.dtype else out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, rstd, weight = ctx.saved_tensors
        grad = grads[0].to(weight.dtype)
        normed = x.to(weight.dtype) * rstd
        product = grad * normed
        grad_weight = product.flatten(0, -2).sum(0)
        total = product.mul_(weight).sum(-1, keepdim=True)
        grad_x = (grad * weight).addcmul_(normed, total, value=-1 / x.shape[-1]).mul_(rstd)
        return grad_x.to(x.dtype), grad_weight, None


class RMSNorm(nn.Module):
    """Computes x / sqrt(mean(x²) + eps) * weight * scale over h for x [b, s, h]; T5's norm.

    See Zhang and Sennrich 2019. For `reader` see `LayerNorm`.
    """

    def __init__(self, h: int, eps: float, reader: str | None = None, scale: float = 1.0) -> None:
        super().__init__()
        self.eps, self.reader, self.scale = eps, reader, scale
        self.weight = new_parameter(h, init=Init(mean=1.0))

    def forward(self, x_BSH: Tensor) -> Tensor:
        weight = self.weight if self.scale == 1.0 else self.weight * self.scale
        return rms_norm(x_BSH, weight, self.eps)


class HeadNorm(nn.Module):
    """RMSNorm over d of queries or keys [b, s, n, d], with one weight [d] for all heads."""

    def __init__(self, d: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = new_parameter(d, init=Init(mean=1.0))

    def forward(self, x_BSND: Tensor) -> Tensor:
        return rms_norm(x_BSND, self.weight, self.eps)


class AllHeadsNorm(nn.Module):
    """RMSNorm over all heads of queries or keys [b, s, n, d] together, with a weight [n d].

    `over` normalizes a matrix whose columns are sharded, if heads are, and `line` says over what.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = new_parameter(width, init=Init(mean=1.0))
        self.over: Callable[..., Tensor] = rms_norm
        self.line: tuple[object, ...] = ()

    def forward(self, x_BSND: Tensor) -> Tensor:
        y = self.over(x_BSND.flatten(-2), self.weight, self.eps, *self.line)
        return y.view(x_BSND.shape)


def new_norm(kind: NormKind, h: int, eps: float, reader: str | None = None) -> LayerNorm | RMSNorm:
    """Returns a norm of the given kind."""
    return LayerNorm(h, eps, reader) if kind == "layer" else RMSNorm(h, eps, reader)
