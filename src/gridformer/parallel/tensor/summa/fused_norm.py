"""C = norm(X) B for products that gather whole rows of X, so that the norm sends nothing itself.

X is gathered along the rows of the grid. Each device normalizes the gathered rows and multiplies
them by its columns of B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gridformer.comm import Pending
from gridformer.models.blocks.gradient_sum import MainGrad
from gridformer.parallel.tensor.summa.chunks import ALL
from gridformer.parallel.tensor.summa.gather import Gather
from gridformer.parallel.tensor.summa.operands import (
    Operand,
    add_bias,
    bias_gradient,
    continued_by,
    tensor_of,
    type_of,
    weight_gradient,
)
from gridformer.parallel.tensor.summa.prefetch import NOTHING, KeepGathered
from gridformer.parallel.tensor.summa.products import Schedule


@dataclass
class Norm:
    """A norm over h: LayerNorm if it has a bias, RMSNorm otherwise.

    Weight [h] and bias [h] are equal on all devices of the grid.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, whole: Tensor) -> Tensor:
        """Normalizes whole rows [.., h]."""
        return normalize(whole, self.weight, self.bias, self.eps)[0]


@dataclass
class Normed:
    """An activation x [.., h/c] that is normalized by the product that reads it."""

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
    padded: bool = False,
) -> Tensor:
    """Computes C = norm(X) B + bias, differentiable.

    Args:
        a: Local block [.., K/c] of X, and its norm.
        b: Local block [K/r, N/c] of the weight.
        schedule: Must be a `Gather`, since panels never hold whole rows.
        bias: Local part [N/c].
        keep: Which gathered operands are kept for later.
        padded: Whether C may have the additional columns of the cast copy of B.

    Returns:
        Local block [.., N/c] of C.
    """
    assert isinstance(schedule, Gather), "a product panel by panel never has whole rows"
    norm = a.norm
    out: Tensor = _NormedAB.apply(
        a.x, norm.weight, norm.bias, b, bias, norm.eps, schedule, keep, padded
    )
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
        padded: bool,
    ) -> Tensor:
        weight = keep.weight_operand(b, x.dtype, padded)
        operand = Operand(x)
        schedule.prefetch(operand, weight)
        keep.prefetch_next(x.dtype)

        normed = Norm(norm_weight, norm_bias, eps)
        kept = schedule.whole_row(operand) if keep.input else x
        c = add_bias(schedule.ab(operand, weight, normed).wait(), bias)
        ctx.save_for_backward(kept, norm_weight, norm_bias, b)
        ctx.schedule, ctx.keep, ctx.eps, ctx.bias = schedule, keep, eps, type_of(bias)
        ctx.weight = b  # has a cast copy, which a recomputed saved tensor lacks
        return c

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, norm_weight, norm_bias, b = ctx.saved_tensors
        schedule = ctx.schedule
        n_columns = b.shape[1]
        weight = ctx.keep.weight_operand(ctx.weight, x.dtype, grads[0].shape[-1] > n_columns)
        operand = Operand(x, Pending(x) if ctx.keep.input else None)
        schedule.prefetch(operand, weight)
        ctx.keep.prefetch_previous(x.dtype)
        column = [schedule.whole_column(weight).t()]
        del weight
        norm = Norm(norm_weight, norm_bias, ctx.eps)
        into = continued_by(schedule, ctx.weight, x.dtype)
        grad_x, grad_b, *of_norm = gradients_of_norm(
            schedule, operand, grads[0], column, norm, into
        )
        grad_norm_weight, grad_norm_bias = (*(grad.wait() for grad in of_norm), None)[:2]
        grad_bias = bias_gradient(grads[0], ctx.bias)
        grad_weight = weight_gradient(grad_b, into, b.dtype, n_columns)  # before grad_x, as in _AB
        return (
            grad_x.wait(),
            grad_norm_weight,
            grad_norm_bias,
            grad_weight,
            grad_bias,
            None,
            None,
            None,
            None,
        )


def gradients_of_norm(
    schedule: Gather,
    a: Operand,
    grad: Tensor,
    columns: list[Tensor],
    norm: Norm,
    into: MainGrad | None,
) -> tuple[Pending, ...]:
    """Computes the gradients of C = norm(X) B, chunk by chunk of X.

    Args:
        schedule: The schedule of the product.
        a: X, local block [.., K/c].
        grad: The gradient of C [.., N/c].
        columns: The transpose of the gathered weight, which is taken out of this list and freed as
            soon as it has been read.
        norm: The norm.
        into: The gradient of B to which the product adds; None if there is none.

    Returns:
        The gradients of X, of B, of the weight of the norm, and of its bias if it has one. The
        first two may be in flight.
    """
    x, column = tensor_of(a), columns.pop()
    shape = torch.Size((*grad.shape[:-1], column.shape[1]))
    sums, terms_b = schedule.sum_of(shape, x), schedule.weight_gradient(a, into)
    norm_grads: list[tuple[Tensor, Tensor | None]] = []
    for chunk, arriving in schedule.arriving(a):
        part = grad if chunk == ALL else schedule.boundary.chunk(grad, chunk)
        # These are partial sums of the gradient of norm(X): this device has whole rows of it for
        # its own columns of B. The gradient of a norm is linear in that of its output, so the
        # partial sums go through the norm first and are reduce-scattered after it.
        terms = part @ column
        if chunk == ALL or chunk.stop == schedule.boundary.max_chunks(shape):
            del column  # frees the gathered weight
        x_whole = arriving.wait()
        del arriving
        normed, statistics = normalize(x_whole, norm.weight, norm.bias, norm.eps)
        terms_x, terms_weight, terms_bias = normalize_backward(
            terms, x_whole, norm.weight, norm.bias, statistics
        )
        del terms, x_whole
        norm_grads.append((terms_weight, terms_bias))
        sums.start(chunk, terms_x.to(x.dtype))
        del terms_x
        terms_b.add(normed, part)
        del normed
    found = [sums.pending(), terms_b.pending()]
    found.append(Pending(_total([weight for weight, _ in norm_grads])))
    if norm.bias is not None:
        found.append(Pending(_total([bias for _, bias in norm_grads if bias is not None])))
    return tuple(found)


def _total(terms: list[Tensor]) -> Tensor:
    return terms[0] if len(terms) == 1 else torch.stack(terms).sum(0)


def normalize(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Applies LayerNorm, or RMSNorm if `bias` is None, over the last dimension.

    Computes in the wider dtype of x and weight.

    Args:
        x: [.., h].
        weight: [h].
        bias: [h], or None for RMSNorm.
        eps: Added to the variance, or to the mean square.

    Returns:
        The normalized tensor [.., h] in the dtype of x, and the statistics [.., 1] that
        `normalize_backward` reads: (mean, rstd), or (rstd,) for RMSNorm.
    """
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
    """Returns the gradients of x [.., h], weight [h] and bias [h] of `normalize`.

    Args:
        grad: Gradient [.., h] of the output.
        x: The input [.., h].
        weight: [h].
        bias: [h], or None for RMSNorm, whose gradient is None.
        statistics: As `normalize` returned them.
    """
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
    """Returns the gradients of x [.., h] and weight [h] of RMSNorm.

    The forward pass is y = normed * weight with normed = x * rstd.

    Args:
        grad: Gradient [.., h] of y.
        normed: [.., h].
        weight: [h].
        rstd: [.., 1].
        mean: Mean of grad * weight * normed over the global h, [.., 1], where h is sharded; None
            if h is whole here, and the mean is then computed.
    """
    product = grad * normed
    grad_weight = product.flatten(0, -2).sum(0)
    if mean is None:
        mean = product.mul_(weight).mean(-1, keepdim=True)
    del product
    return (grad * weight).addcmul_(normed, mean, value=-1).mul_(rstd), grad_weight
