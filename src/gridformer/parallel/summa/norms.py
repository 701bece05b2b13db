"""Norms over whole rows, for products that gather their rows anyway: values and gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Norm:
    """A norm over whole rows: weight [h] and bias [h] are the same on every device of the grid.

    With a bias a LayerNorm, without one an RMSNorm.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float


@dataclass
class Normed:
    """An activation [.., h/c] whose norm is left to the product that reads it."""

    x: Tensor
    norm: Norm

    @property
    def shape(self) -> torch.Size:
        return self.x.shape


def normalise(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A norm in the parameters' precision: result in x's, and its statistics."""
    wide = x.to(torch.promote_types(x.dtype, weight.dtype))
    if bias is None:
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * rstd).mul_(weight).to(x.dtype), (rstd,)
    normed, mean, rstd = torch.native_layer_norm(wide, [x.shape[-1]], weight, bias, eps)
    return normed.to(x.dtype), (mean, rstd)


def normalise_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    statistics: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of x, weight and bias."""
    wide = torch.promote_types(x.dtype, weight.dtype)
    grad, x = grad.to(wide), x.to(wide)
    if bias is None:
        return *rms_norm_backward(grad, x * statistics[0], weight, statistics[0], None), None
    found = torch.ops.aten.native_layer_norm_backward(
        grad, x, [x.shape[-1]], *statistics, weight, bias, [True, True, True]
    )
    return found[0], found[1], found[2]


def rms_norm_backward(
    grad: Tensor, normed: Tensor, weight: Tensor, rstd: Tensor, mean: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight of y = normed * weight, normed = x * rstd.

    mean: of grad * weight * normed over h, [.., 1]; computed here if it is None.
    """
    grad_normed = grad * weight
    if mean is None:
        mean = (grad_normed * normed).mean(-1, keepdim=True)
    grad_weight = (grad * normed).flatten(0, -2).sum(0)
    return (grad_normed - normed * mean).mul_(rstd), grad_weight
