"""The products as autograd sees them. The set is closed under differentiation (Xu et al. 2021):

    C = A B     dA = dC Bᵀ    dB = Aᵀ dC
    C = A Bᵀ    dA = dC B     dB = dCᵀ A
    C = Aᵀ B    dA = B dCᵀ    dB = A dC

Backward, both gradients' operands are asked for first, and the first gradient's sum travels while
the second is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gridformer import comm
from gridformer.comm import Pending
from gridformer.mesh import Axes
from gridformer.parallel.tensor.boundary import LABEL
from gridformer.parallel.tensor.summa.fused_norm import Normed, product_of_norm
from gridformer.parallel.tensor.summa.gather import Gather
from gridformer.parallel.tensor.summa.operands import (
    OneHotOperand,
    Operand,
    arrived,
    bias_gradient,
    type_of,
)
from gridformer.parallel.tensor.summa.prefetch import NOTHING, KeepGathered
from gridformer.parallel.tensor.summa.products import Schedule


def product_ab(
    a: Tensor | Normed,
    b: Tensor,
    schedule: Schedule,
    bias: Tensor | None = None,
    keep: KeepGathered = NOTHING,
) -> Tensor:
    """Differentiable C = A B + bias. a [.., K/c], b [K/r, N/c], bias [N/c]; result [.., N/c].

    The input stays behind; A travels along the rows. A `Normed` a needs the schedule `Gather`: the
    rows are gathered first and normalized whole, so that the norm itself sends nothing.
    """
    if isinstance(a, Normed):
        return product_of_norm(a, b, schedule, bias, keep)
    operand = Operand(a)

    def compute() -> Tensor:
        weight = keep.weight_operand(b, a.dtype)
        schedule.prefetch(operand, weight)
        keep.prefetch_next(a.dtype)
        c = schedule.ab(operand, weight).wait()
        if bias is not None:
            c += bias.to(c.dtype)
        return c

    place = _AB.apply(a, b, bias, schedule, keep, operand)
    out: Tensor = _Carry.apply(place, compute)
    return out


def product_abt(
    a: Tensor,
    b: Tensor,
    schedule: Schedule,
    bias: Tensor | None = None,
    keep: KeepGathered = NOTHING,
) -> Tensor:
    """Differentiable C = A Bᵀ + bias. a [.., K/c], b [N/r, K/c], bias [N/c]; result [.., N/c].

    A stays where it is; terms of C travel along the rows, summed.
    """

    def compute() -> Tensor:
        weight = keep.weight_operand(b, a.dtype)
        schedule.prefetch(None, weight)
        keep.prefetch_next(a.dtype)
        c = schedule.abt(Operand(a), weight).wait()
        if bias is not None:
            c += bias.to(c.dtype)
        return c

    place = _ABt.apply(a, b, bias, schedule, keep)
    out: Tensor = _Carry.apply(place, compute)
    return out


def product_atb(a: Tensor, b: Tensor, schedule: Schedule) -> Tensor:
    """Differentiable C = Aᵀ B. a [K/r, M/c], b [K/r, N/c]; result [M/r, N/c]."""
    out: Tensor = _AtB.apply(a, b, schedule)
    return out


def lookup(
    tokens: Tensor,
    table: Tensor,
    schedule: Schedule,
    axes: Axes,
    output_stays: bool,
    keep: KeepGathered = NOTHING,
) -> Tensor:
    """Differentiable rows of a table for tokens [...] that are equal along a row: [..., h/c].

    The one-hot matrix of the tokens times the table: C = A B with table [v/r, h/c], or
    (`output_stays` false) C = A Bᵀ with table [h/r, v/c]. Nothing of the one-hot matrix travels.
    """
    out: Tensor = _Lookup.apply(tokens, table, schedule, axes, output_stays, keep)
    return out


def whole_column(
    b: Tensor, dtype: torch.dtype, schedule: Gather, keep: KeepGathered = NOTHING
) -> Tensor:
    """Differentiable: all of a weight's column in `dtype`, [K/r, N/c] to [K, N/c].

    For several products in turn, on a grid of one row: the weight travels once for all of them, and
    so does the sum of its gradients.
    """
    out: Tensor = _WholeColumn.apply(b, dtype, schedule, keep)
    return out


class _WholeColumn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, b: Tensor, dtype: torch.dtype, schedule: Gather, keep: KeepGathered
    ) -> Tensor:
        ctx.row, ctx.dtype = schedule.row, b.dtype
        return schedule.whole_column(keep.weight_operand(b, dtype)).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = comm.start_reduce_scatter(grads[0].contiguous(), ctx.row, 0, LABEL)
        return grad.wait().to(ctx.dtype), None, None, None


class _AB(torch.autograd.Function):
    """Records C = A B + bias for the backward pass. `_Carry` computes it, after.

    So where a block that ends in this product is computed again in the backward pass
    (torch.utils.checkpoint), that ends before it: nothing backward needs its result. Of an input
    that is kept gathered the gathering is needed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        schedule: Schedule,
        keep: KeepGathered,
        operand: Operand,
    ) -> Tensor:
        if keep.input:
            schedule.prefetch(operand, None)
        ctx.whole = keep.input and operand.whole is not None
        ctx.save_for_backward(operand.whole.wait() if ctx.whole else a, b)  # type: ignore[union-attr]
        ctx.schedule, ctx.keep, ctx.bias = schedule, keep, type_of(bias)
        return schedule.empty_ab_like(a, b.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        a, b = ctx.saved_tensors
        schedule, grad = ctx.schedule, Operand(grads[0])
        wants_a, wants_b = ctx.needs_input_grad[:2]
        operand = Operand(a, Pending(a) if ctx.whole else None)
        weight = ctx.keep.weight_operand(b, a.dtype)
        schedule.prefetch(operand if wants_b else None, weight if wants_a else None)
        ctx.keep.prefetch_previous(a.dtype)
        grad_a = schedule.abt(grad, weight) if wants_a else None
        del weight  # and what was gathered of it
        grad_b = schedule.atb(operand, grad) if wants_b else None
        grad_bias = bias_gradient(grads[0], ctx.bias)
        # The weight's first: what is left to multiply for it is done while both sums travel.
        weight_gradient = arrived(grad_b, b.dtype)
        return arrived(grad_a, a.dtype), weight_gradient, grad_bias, None, None, None


class _ABt(torch.autograd.Function):
    """Records C = A Bᵀ + bias for the backward pass; `_Carry` computes it, after. See _AB."""

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        schedule: Schedule,
        keep: KeepGathered,
    ) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.schedule, ctx.keep, ctx.bias = schedule, keep, type_of(bias)
        return schedule.empty_abt_like(a, b.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        a, b = ctx.saved_tensors
        schedule, grad = ctx.schedule, Operand(grads[0])
        wants_a, wants_b = ctx.needs_input_grad[:2]
        weight = ctx.keep.weight_operand(b, a.dtype)
        schedule.prefetch(grad, weight if wants_a else None)
        ctx.keep.prefetch_previous(a.dtype)
        grad_a: Pending | None
        grad_b: Pending | None
        if isinstance(schedule, Gather) and wants_a and wants_b:  # whole lines serve both
            grad_a, grad_b = schedule.ab_and_atb(grad, weight, a)
        else:
            grad_b = schedule.atb(grad, Operand(a)) if wants_b else None
            grad_a = schedule.ab(grad, weight) if wants_a else None
        del weight  # and what was gathered of it
        grad_bias = bias_gradient(grads[0], ctx.bias)
        return arrived(grad_a, a.dtype), arrived(grad_b, b.dtype), grad_bias, None, None


class _Carry(torch.autograd.Function):
    """The result of `compute` in the place of a tensor that stands for it."""

    @staticmethod
    def forward(ctx: Any, place: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        return compute()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _AtB(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, schedule: Schedule) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.schedule = schedule
        return schedule.atb(Operand(a), Operand(b)).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        a, b = ctx.saved_tensors
        schedule, grad = ctx.schedule, Operand(grads[0])
        grad_a = schedule.abt(Operand(b), grad) if ctx.needs_input_grad[0] else None
        grad_b = schedule.ab(Operand(a), grad) if ctx.needs_input_grad[1] else None
        return arrived(grad_a, a.dtype), arrived(grad_b, b.dtype), None


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        table: Tensor,
        schedule: Schedule,
        axes: Axes,
        output_stays: bool,
        keep: KeepGathered,
    ) -> Tensor:
        ctx.save_for_backward(tokens)
        v = table.shape[0] * axes.row.size if output_stays else table.shape[1] * axes.col.size
        ctx.schedule, ctx.axes, ctx.v, ctx.output_stays = schedule, axes, v, output_stays
        product = schedule.ab if output_stays else schedule.abt
        one_hot = OneHotOperand(tokens, v, axes.col)
        return product(one_hot, keep.weight_operand(table, table.dtype)).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (tokens,) = ctx.saved_tensors
        one_hot, grad = OneHotOperand(tokens, ctx.v, ctx.axes.col), Operand(grads[0])
        both = (one_hot, grad) if ctx.output_stays else (grad, one_hot)
        return None, ctx.schedule.atb(*both).wait(), None, None, None, None
