"""The products as differentiable functions.

The set of three products is closed under differentiation (Xu et al. 2021):

    C = A B     dA = dC Bᵀ    dB = Aᵀ dC
    C = A Bᵀ    dA = dC B     dB = dCᵀ A
    C = Aᵀ B    dA = B dCᵀ    dB = A dC

A backward pass first starts to gather the operands of both gradients. The sum of the first gradient
travels while the second one is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gridformer import comm
from gridformer.comm import Pending
from gridformer.mesh import Axes
from gridformer.models.blocks.cast import padded_columns
from gridformer.parallel.tensor.boundary import LABEL
from gridformer.parallel.tensor.summa.gather import Gather
from gridformer.parallel.tensor.summa.operands import (
    OneHotOperand,
    Operand,
    add_bias,
    arrived,
    bias_gradient,
    continued_by,
    type_of,
    weight_gradient,
)
from gridformer.parallel.tensor.summa.prefetch import NOTHING, KeepGathered
from gridformer.parallel.tensor.summa.products import Schedule


def product_ab(
    a: Tensor,
    b: Tensor,
    schedule: Schedule,
    bias: Tensor | None = None,
    keep: KeepGathered = NOTHING,
    padded: bool = False,
) -> Tensor:
    """Computes C = A B + bias (Optimus, Algorithm 1), differentiable.

    C stays where it is computed; A is sent along the rows of the grid, and B down its columns.

    Args:
        a: Local block [.., K/c].
        b: Local block [K/r, N/c].
        schedule: How panels travel.
        bias: Local part [N/c].
        keep: Which gathered operands are kept for later.
        padded: Whether C may have the additional columns of the cast copy of B; needs `Gather`.

    Returns:
        Local block [.., N/c] of C.
    """
    operand = Operand(a)
    width = padded_columns(b, a.dtype) if padded else b.shape[1]

    def compute() -> Tensor:
        weight = keep.weight_operand(b, a.dtype, padded)
        schedule.prefetch(operand, weight)
        keep.prefetch_next(a.dtype)
        return add_bias(schedule.ab(operand, weight).wait(), bias)

    place = _AB.apply(a, b, bias, schedule, keep, operand, width)
    out: Tensor = _Carry.apply(place, compute)
    return out


def product_abt(
    a: Tensor,
    b: Tensor,
    schedule: Schedule,
    bias: Tensor | None = None,
    keep: KeepGathered = NOTHING,
) -> Tensor:
    """Computes C = A Bᵀ + bias (Optimus, Algorithm 2), differentiable.

    A stays where it is; partial sums of C are reduced along the rows of the grid, and B is sent
    down its columns.

    Args:
        a: Local block [.., K/c].
        b: Local block [N/r, K/c].
        schedule: How panels travel.
        bias: Local part [N/c].
        keep: Which gathered operands are kept for later. The gathered input is not one of them
            here, since A is not gathered.

    Returns:
        Local block [.., N/c] of C.
    """

    def compute() -> Tensor:
        weight = keep.weight_operand(b, a.dtype)
        schedule.prefetch(None, weight)
        keep.prefetch_next(a.dtype)
        return add_bias(schedule.abt(Operand(a), weight).wait(), bias)

    place = _ABt.apply(a, b, bias, schedule, keep)
    out: Tensor = _Carry.apply(place, compute)
    return out


def product_atb(a: Tensor, b: Tensor, schedule: Schedule) -> Tensor:
    """Computes C = Aᵀ B (Optimus, Algorithm 3), differentiable.

    Args:
        a: Local block [K/r, M/c].
        b: Local block [K/r, N/c].
        schedule: How panels travel.

    Returns:
        Local block [M/r, N/c] of C.
    """
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
    """Looks up the table rows of tokens, differentiable with respect to the table.

    This is the product of the one-hot matrix of the tokens and the table (Xu et al. 2021). The
    one-hot matrix is never materialized or sent.

    Args:
        tokens: Token ids [...], equal along a row of devices.
        table: Local block [v/r, h/c] for C = A B, or [h/r, v/c] for C = A Bᵀ.
        schedule: How panels of the table travel.
        axes: Axes of the grid.
        output_stays: True for C = A B, False for C = A Bᵀ.
        keep: Whether the gathered table is kept for later.

    Returns:
        Local columns [..., h/c] of the embeddings.
    """
    out: Tensor = _Lookup.apply(tokens, table, schedule, axes, output_stays, keep)
    return out


def whole_column(
    b: Tensor,
    dtype: torch.dtype,
    schedule: Gather,
    keep: KeepGathered = NOTHING,
    padded: bool = False,
) -> Tensor:
    """Gathers a weight down its column: forward all-gather, backward reduce-scatter of its rows.

    Several products can then read the result as on a grid of one row, and the weight and the sum of
    its gradients travel only once for all of them.

    Args:
        b: Local block [K/r, N/c].
        dtype: Dtype of the result.
        schedule: Gathers the weight.
        keep: Whether the gathered weight is kept for later.
        padded: Whether the result may have the additional columns of the cast copy.

    Returns:
        The column [K, N/c] of the weight.
    """
    out: Tensor = _WholeColumn.apply(b, dtype, schedule, keep, padded)
    return out


class _WholeColumn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        b: Tensor,
        dtype: torch.dtype,
        schedule: Gather,
        keep: KeepGathered,
        padded: bool,
    ) -> Tensor:
        ctx.row, ctx.dtype, ctx.n_columns = schedule.row, b.dtype, b.shape[1]
        return schedule.whole_column(keep.weight_operand(b, dtype, padded)).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0][:, : ctx.n_columns].contiguous()
        total = comm.start_reduce_scatter(grad, ctx.row, 0, LABEL)
        return total.wait().to(ctx.dtype), None, None, None, None


class _AB(torch.autograd.Function):
    """Saves the operands of C = A B + bias for the backward pass; `_Carry` computes C afterward.

    The backward pass does not need C. torch.utils.checkpoint stops recomputing as soon as it has
    every saved tensor, so it skips this product at the end of a block (Xu et al. 2021). If the
    gathered input is kept, it is a saved tensor and is gathered again.
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
        width: int,
    ) -> Tensor:
        if keep.input:
            schedule.prefetch(operand, None)
        ctx.whole = keep.input and operand.whole is not None
        ctx.save_for_backward(operand.whole.wait() if ctx.whole else a, b)  # type: ignore[union-attr]
        ctx.schedule, ctx.keep, ctx.bias = schedule, keep, type_of(bias)
        ctx.weight = b  # has a cast copy, which a recomputed saved tensor lacks
        return schedule.empty_ab_like(a, width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        a, b = ctx.saved_tensors
        schedule, grad = ctx.schedule, Operand(grads[0])
        wants_a, wants_b = ctx.needs_input_grad[:2]
        operand = Operand(a, Pending(a) if ctx.whole else None)
        n_columns = b.shape[1]
        weight = ctx.keep.weight_operand(ctx.weight, a.dtype, grads[0].shape[-1] > n_columns)
        schedule.prefetch(operand if wants_b else None, weight if wants_a else None)
        ctx.keep.prefetch_previous(a.dtype)
        grad_a = schedule.abt(grad, weight) if wants_a else None
        del weight  # frees what was gathered of it
        into = continued_by(schedule, ctx.weight, a.dtype) if wants_b else None
        grad_b = schedule.atb(operand, grad, into) if wants_b else None
        grad_bias = bias_gradient(grads[0], ctx.bias)
        # Waits for grad_b first: its remaining product then runs while both sums travel.
        grad_weight = weight_gradient(grad_b, into, b.dtype, n_columns)
        return arrived(grad_a, a.dtype), grad_weight, grad_bias, None, None, None, None


class _ABt(torch.autograd.Function):
    """Saves the operands of C = A Bᵀ + bias; `_Carry` computes C afterward, see `_AB`."""

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
        ctx.weight = b  # has a cast copy, which a recomputed saved tensor lacks
        return schedule.empty_abt_like(a, b.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        a, b = ctx.saved_tensors
        schedule, grad = ctx.schedule, Operand(grads[0])
        wants_a, wants_b = ctx.needs_input_grad[:2]
        weight = ctx.keep.weight_operand(ctx.weight, a.dtype)
        schedule.prefetch(grad, weight if wants_a else None)
        ctx.keep.prefetch_previous(a.dtype)
        grad_a: Pending | None
        grad_b: Pending | None
        into = continued_by(schedule, ctx.weight, a.dtype) if wants_b else None
        if isinstance(schedule, Gather) and wants_a and wants_b:  # gathers dC once for both
            grad_a, grad_b = schedule.ab_and_atb(grad, weight, a, into)
        else:
            grad_b = schedule.atb(grad, Operand(a), into) if wants_b else None
            grad_a = schedule.ab(grad, weight) if wants_a else None
        del weight  # frees what was gathered of it
        grad_bias = bias_gradient(grads[0], ctx.bias)
        grad_weight = weight_gradient(grad_b, into, b.dtype, b.shape[1])
        return arrived(grad_a, a.dtype), grad_weight, grad_bias, None, None


class _Carry(torch.autograd.Function):
    """Replaces the empty result of `_AB` or `_ABt` by that of `compute`; identity backward."""

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
