"""C = norm(X) B for products that gather whole rows of X anyway: so the norm itself sends nothing.

X is gathered along the rows of the grid, and each device normalizes whole rows before it multiplies
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gridformer.comm import Pending
from gridformer.parallel.tensor.summa.chunks import ALL
from gridformer.parallel.tensor.summa.gather import Gather
from gridformer.parallel.tensor.summa.operands import Operand, arrived, bias_gradient, type_of
from gridformer.parallel.tensor.summa.prefetch import NOTHING, KeepGathered
from gridformer.parallel.tensor.summa.products import Schedule


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


def product_of_norm(
    a: Normed,
    b: Tensor,
    schedule: Schedule,
    bias: Tensor | None = None,
    keep: KeepGathered = NOTHING,
) -> Tensor:
    """Differentiable C = norm(X) B + bias. X [.., K/c], b [K/r, N/c], bias [N/c], C [.., N/c]."""
    assert isinstance(schedule, Gather), "a product panel by panel never has whole rows"
    norm = a.norm
    out: Tensor = _NormedAB.apply(a.x, norm.weight, norm.bias, b, bias, norm.eps, schedule, keep)
    return out


class _NormedAB(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        b: Tensor,
        bias: Tensor | None,
        eps: float,
        schedule: Gather,
        keep: KeepGathered,
    ) -> Tensor:
        weight = keep.weight_operand(b, x.dtype)
        operand = Operand(x)
        schedule.prefetch(operand, weight)
        keep.prefetch_next(x.dtype)

        def normed(whole: Tensor) -> Tensor:
            return normalize(whole, norm_weight, norm_bias, eps)[0]

        kept = schedule.whole_row(operand) if keep.input else x
        c = schedule.ab(operand, weight, normed).wait()
        if bias is not None:
            c += bias.to(c.dtype)
        ctx.save_for_backward(kept, norm_weight, norm_bias, b)
        ctx.schedule, ctx.keep, ctx.eps, ctx.bias = schedule, keep, eps, type_of(bias)
        return c

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, norm_weight, norm_bias, b = ctx.saved_tensors
        schedule = ctx.schedule
        weight = ctx.keep.weight_operand(b, x.dtype)
        operand = Operand(x, Pending(x) if ctx.keep.input else None)
        schedule.prefetch(operand, weight)
        ctx.keep.prefetch_previous(x.dtype)
        column = schedule.whole_column(weight).t()
        del weight
        shape = torch.Size((*grads[0].shape[:-1], column.shape[1]))
        sums = schedule.sum_of(shape, x)
        terms_b = schedule.weight_gradient(operand)
        of_norm: list[tuple[Tensor, Tensor | None]] = []
        for chunk, arriving in schedule.arriving(operand):
            grad = grads[0] if chunk == ALL else schedule.boundary.chunk(grads[0], chunk)
            # Terms of the norm's gradient: this device's columns of B have seen all of a row. A
            # norm's gradient is linear in its output's, so they pass through it and are summed.
            terms = grad @ column
            if chunk == ALL or chunk.stop == schedule.boundary.n_lines(shape):
                del column  # what was gathered of the weight
            x_whole = arriving.wait()
            del arriving
            normed, statistics = normalize(x_whole, norm_weight, norm_bias, ctx.eps)
            terms_x, terms_weight, terms_bias = normalize_backward(
                terms, x_whole, norm_weight, norm_bias, statistics
            )
            del terms, x_whole
            of_norm.append((terms_weight, terms_bias))
            sums.start(chunk, terms_x.to(x.dtype))
            del terms_x
            terms_b.add(normed, grad)
            del normed
        grad_x, grad_b = sums.pending(), terms_b.pending()
        grad_norm_weight = _added_up([weight for weight, _ in of_norm])
        grad_norm_bias = None
        if norm_bias is not None:
            grad_norm_bias = _added_up([bias for _, bias in of_norm if bias is not None])
        grad_bias = bias_gradient(grads[0], ctx.bias)
        weight_gradient = arrived(grad_b, b.dtype)  # first, as in _AB
        return (
            grad_x.wait(),
            grad_norm_weight,
            grad_norm_bias,
            weight_gradient,
            grad_bias,
            None,
            None,
            None,
        )


def _added_up(terms: list[Tensor]) -> Tensor:
    return terms[0] if len(terms) == 1 else torch.stack(terms).sum(0)


def normalize(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A norm in the parameters' precision: result in x's, and its statistics."""
    wide = x.to(torch.promote_types(x.dtype, weight.dtype))
    if bias is None:
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * rstd).mul_(weight).to(x.dtype), (rstd,)
    normed, mean, rstd = torch.native_layer_norm(wide, [x.shape[-1]], weight, bias, eps)
    return normed.to(x.dtype), (mean, rstd)


def normalize_backward(
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
