"""The products as differentiable functions, output stationary and input stationary.

The set of three products is closed under differentiation (Xu et al. 2021):

    C = A B     dA = dC Bᵀ    dB = Aᵀ dC
    C = A Bᵀ    dA = dC B     dB = dCᵀ A
    C = Aᵀ B    dA = B dCᵀ    dB = A dC

A backward pass first starts to gather the operands of both gradients. The sum of the first gradient
travels while the second one is multiplied, and that of a weight's gradient while the product before
goes backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gridformer import comm
from gridformer.comm import Pending
from gridformer.mesh import Axes
from gridformer.models.blocks.gradient_sum import GradientSum, continued
from gridformer.models.blocks.late_gradient import SPLIT, LateGradient, Started
from gridformer.parallel.tensor.summa.gathered import (
    LABEL,
    Gathered,
    Operand,
    add_bias,
    weight_operand,
)
from gridformer.parallel.tensor.summa.panels import Broadcast
from gridformer.parallel.tensor.summa.weights import DeferredSum, GatheredWeight

Schedule = Gathered | Broadcast  # how the products of a model communicate
# Whom a product leaves the sum of its weight's gradient to, and the sum that is left to it.
Sums = tuple[DeferredSum | None, DeferredSum | None]
_ALONE: Sums = (None, None)


def product_ab(
    a: Tensor,
    b: Tensor,
    schedule: Schedule,
    bias: Tensor | None = None,
    weight: GatheredWeight | None = None,
    keep_input: bool = False,
    padded: bool = False,
    ends_block: bool = False,
) -> Tensor:
    """Computes C = A B + bias (Optimus, Algorithm 1), differentiable: the output is stationary.

    A is sent along the rows of the grid, and B down its columns. Local blocks are a [.., K/c],
    b [K/r, N/c], bias [N/c] and the result [.., N/c].

    Args:
        weight: What is gathered of B, if it is gathered ahead or kept.
        keep_input: Whether the gathered A is kept for the backward pass.
        padded: Whether C may have the additional columns of the cast copy of B; needs `Gathered`.
        ends_block: Whether a block that may be recomputed ends with C.
    """
    operand, sums = Operand(a), weight.deferred(a, b) if weight and weight.is_open else _ALONE
    late = LateGradient.of(b) if SPLIT.wanted else None
    how = schedule, weight, sums, keep_input, padded, ends_block, late
    left = sums[1].parameters if sums[1] else ()
    out: Tensor = _AB.apply(a, b, bias, operand, *how, *left)
    if ends_block:
        out = Computed.apply(out, lambda: _ab(operand, b, bias, schedule, weight, padded))
    return out


def product_abt(
    a: Tensor,
    b: Tensor,
    schedule: Schedule,
    bias: Tensor | None = None,
    weight: GatheredWeight | None = None,
    ends_block: bool = False,
) -> Tensor:
    """Computes C = A Bᵀ + bias (Optimus, Algorithm 2), differentiable: the input is stationary.

    Partial sums of C are reduced along the rows of the grid, and B is sent down its columns. Local
    blocks are a [.., K/c], b [N/r, K/c], bias [N/c] and the result [.., N/c]; see `product_ab`.
    """
    sums = weight.deferred(a, b) if weight and weight.is_open else _ALONE
    left = sums[1].parameters if sums[1] else ()
    late = LateGradient.of(b) if SPLIT.wanted else None
    how = schedule, weight, sums, ends_block, late
    out: Tensor = _ABt.apply(a, b, bias, *how, *left)
    if ends_block:
        out = Computed.apply(out, lambda: _abt(a, b, bias, schedule, weight))
    return out


def lookup(
    tokens: Tensor,
    table: Tensor,
    schedule: Schedule,
    axes: Axes,
    output_stationary: bool,
    weight: GatheredWeight | None = None,
) -> Tensor:
    """Looks up the table rows of tokens, differentiable with respect to the table.

    This is the product of the one-hot matrix of the tokens and the table (Xu et al. 2021). The
    one-hot matrix is never materialized or sent.

    Args:
        tokens: Token ids [...], equal along a row of devices.
        table: Local block [v/r, h/c] if the output stays, C = A B, or [h/r, v/c] for C = A Bᵀ.
        weight: What is gathered of the table, if it is gathered ahead or kept.

    Returns:
        Local columns [..., h/c] of the embeddings.
    """
    out: Tensor = _Lookup.apply(tokens, table, schedule, axes, output_stationary, weight)
    return out


def whole_column(
    b: Tensor,
    dtype: torch.dtype,
    schedule: Gathered,
    weight: GatheredWeight | None = None,
    padded: bool = False,
) -> Tensor:
    """Gathers a weight down its column: forward all-gather, backward reduce-scatter of its rows.

    Several products can then read the result as on a grid of one row, and the weight and the sum of
    its gradients travel only once for all of them.

    Args:
        b: Local block [K/r, N/c] of the weight, whose column [K, N/c] is returned.
        weight: What is gathered of it already, if it is gathered ahead or kept.
        padded: Whether the result may have the additional columns of the cast copy.
    """
    out: Tensor = _WholeColumn.apply(b, dtype, schedule, weight, padded)
    return out


# --------------------------------------------------------------------------- output stationary


class _AB(torch.autograd.Function):
    """C = A B + bias. Keeps A, or its gathered rows.

    torch.utils.checkpoint stops recomputing as soon as it has every saved tensor, so it would skip
    a product at the end of a block (Xu et al. 2021) if that were computed after its operands are
    saved. There the result is an empty tensor of the shape of C, which `Computed` replaces.
    """

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        operand: Operand,
        schedule: Schedule,
        weight: GatheredWeight | None,
        sums: Sums,
        keep_input: bool,
        padded: bool,
        ends_block: bool,
        late: LateGradient | None,
        *_: Tensor,
    ) -> Tensor:
        kept = None
        if keep_input:
            schedule.start(operand, None)
            kept = operand.whole
        ctx.whole = kept is not None
        ctx.save_for_backward(a if kept is None else kept.wait())
        # The weight itself has a cast copy, which a recomputed saved tensor lacks.
        ctx.schedule, ctx.gathered_weight, ctx.weight, ctx.bias = schedule, weight, b, bias
        ctx.sums, ctx.late = sums, late
        if ends_block:
            return b.new_empty((), dtype=a.dtype).expand(schedule.shape_of_ab(a, b.shape[1]))
        return _ab(operand, b, bias, schedule, weight, padded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (a,), b, schedule = ctx.saved_tensors, ctx.weight, ctx.schedule.in_backward
        wants_a, wants_b = ctx.needs_input_grad[:2]
        grad, operand = Operand(grads[0]), Operand(a, Pending(a) if ctx.whole else None)
        if wants_b and ctx.late is not None:
            wants_b = not _left(ctx, schedule, a, grads[0], ctx.whole)
        padded, ahead = grads[0].shape[-1] > b.shape[1], ctx.gathered_weight
        weight = ahead.operand(b, a.dtype, padded) if ahead else weight_operand(b, a.dtype, padded)
        schedule.start(operand if wants_b else None, weight if wants_a else None)
        if ahead:
            ahead.prefetch_previous(a.dtype)
        grad_a = schedule.abt(grad, weight) if wants_a else None
        del weight  # frees what was gathered of it
        if ctx.sums[1]:
            ctx.sums[1].begin()  # while grad_a travels
        grad_weight = None
        if wants_b and not _multiplied_late(ctx, operand, operand, grad, a.dtype):
            into = _continued(ctx, a.dtype)
            # Waits for this gradient first: the sum of grad_a may then travel longer.
            grad_weight = _weight_gradient(ctx, schedule.atb(operand, grad, into), into)
        grad_bias = _bias_gradient(ctx, grads[0])
        grad_a = None if grad_a is None else grad_a.wait().to(a.dtype)
        left = ctx.sums[1].gradients(ctx.needs_input_grad[11:]) if ctx.sums[1] else ()
        return grad_a, grad_weight, grad_bias, *[None] * 8, *left


def _ab(
    a: Operand,
    b: Tensor,
    bias: Tensor | None,
    schedule: Schedule,
    ahead: GatheredWeight | None,
    padded: bool,
) -> Tensor:
    dtype = a.local.dtype
    weight = ahead.operand(b, dtype, padded) if ahead else weight_operand(b, dtype, padded)
    schedule.start(a, weight)
    if ahead:
        ahead.prefetch_next(dtype)
    return schedule.ab(a, weight, bias)


class Computed(torch.autograd.Function):
    """Computes a product that ends a block, whose result is empty so far; identity backward."""

    @staticmethod
    def forward(ctx: Any, place: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        return compute()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _WholeColumn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        b: Tensor,
        dtype: torch.dtype,
        schedule: Gathered,
        ahead: GatheredWeight | None,
        padded: bool,
    ) -> Tensor:
        ctx.row, ctx.dtype, ctx.n_columns = schedule.row, b.dtype, b.shape[1]
        weight = ahead.operand(b, dtype, padded) if ahead else weight_operand(b, dtype, padded)
        schedule.start(None, weight)
        assert weight.whole is not None
        return weight.whole.wait().detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0][:, : ctx.n_columns].contiguous()
        total = comm.start_reduce_scatter(grad, ctx.row, 0, LABEL)
        return total.wait().to(ctx.dtype), None, None, None, None


# --------------------------------------------------------------------------- input stationary


class _ABt(torch.autograd.Function):
    """C = A Bᵀ + bias; for the empty tensor at the end of a block see `_AB`."""

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        schedule: Schedule,
        weight: GatheredWeight | None,
        sums: Sums,
        ends_block: bool,
        late: LateGradient | None,
        *_: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(a)
        ctx.schedule, ctx.gathered_weight, ctx.weight, ctx.bias = schedule, weight, b, bias
        ctx.sums, ctx.late = sums, late
        if ends_block:
            device = torch.device("meta") if schedule.sums_elsewhere else a.device
            return a.new_empty((), device=device).expand(schedule.shape_of_abt(a, b.shape[0]))
        return _abt(a, b, bias, schedule, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (a,), b, schedule = ctx.saved_tensors, ctx.weight, ctx.schedule
        wants_a, wants_b = ctx.needs_input_grad[:2]
        if ahead := ctx.gathered_weight:
            schedule = schedule.in_backward if ahead.late else schedule
        grad, operand = Operand(grads[0]), Operand(a)
        if wants_b and ctx.late is not None:
            wants_b = not _left(ctx, schedule, grads[0], a)
        weight = ahead.operand(b, a.dtype) if ahead else weight_operand(b, a.dtype)
        schedule.start(grad, weight if wants_a else None)
        if ahead:
            ahead.prefetch_previous(a.dtype)
        if ctx.sums[1]:
            ctx.sums[1].begin()  # while grad is gathered
        grad_a: Tensor | None = None
        grad_b: Pending | None = None
        if wants_b and _multiplied_late(
            ctx, grad, Operand(grad.local, grad.whole), operand, a.dtype
        ):
            wants_b = False
        into = _continued(ctx, a.dtype) if wants_b else None
        if wants_a and wants_b:
            grad_a, grad_b = schedule.ab_and_atb(grad, weight, operand, into)
        elif wants_b:
            grad_b = schedule.atb(grad, operand, into)
        elif wants_a:
            grad_a = schedule.ab(grad, weight)
        del weight  # frees what was gathered of it
        grad_bias = _bias_gradient(ctx, grads[0])
        grad_weight = _weight_gradient(ctx, grad_b, into)
        del grad_b
        grad_a = None if grad_a is None else grad_a.to(a.dtype)
        left = ctx.sums[1].gradients(ctx.needs_input_grad[8:]) if ctx.sums[1] else ()
        return grad_a, grad_weight, grad_bias, *[None] * 5, *left


def _abt(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    schedule: Schedule,
    ahead: GatheredWeight | None,
) -> Tensor:
    weight = ahead.operand(b, a.dtype) if ahead else weight_operand(b, a.dtype)
    schedule.start(None, weight)
    if ahead:
        ahead.prefetch_next(a.dtype)
    if bias is not None and isinstance(schedule, Gathered) and schedule.sums_bias:
        return schedule.abt(Operand(a), weight, bias).wait()
    c = schedule.abt(Operand(a), weight).wait()
    if bias is not None:
        add_bias(c, bias)
    return c


# --------------------------------------------------------------------------- lookup


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        table: Tensor,
        schedule: Schedule,
        axes: Axes,
        output_stationary: bool,
        ahead: GatheredWeight | None,
    ) -> Tensor:
        ctx.save_for_backward(tokens)
        v = table.shape[0] * axes.row.size if output_stationary else table.shape[1] * axes.col.size
        ctx.schedule, ctx.axes, ctx.v, ctx.output_stationary = schedule, axes, v, output_stationary
        one_hot = Operand.one_hot(tokens, v, axes.col)
        weight = ahead.operand(table, table.dtype) if ahead else weight_operand(table, table.dtype)
        if output_stationary:
            return schedule.ab(one_hot, weight)
        return schedule.abt(one_hot, weight).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (tokens,) = ctx.saved_tensors
        one_hot, grad = Operand.one_hot(tokens, ctx.v, ctx.axes.col), Operand(grads[0])
        both = (one_hot, grad) if ctx.output_stationary else (grad, one_hot)
        return None, ctx.schedule.atb(*both).wait(), None, None, None, None


# --------------------------------------------------------------------------- gradients


def _bias_gradient(ctx: Any, grad: Tensor) -> Tensor | None:
    """Returns the gradient [N] of a bias, given that of the output [.., N or more]."""
    bias: Tensor | None = ctx.bias
    if bias is None:
        return None
    return grad.flatten(0, -2).sum(0, dtype=bias.dtype)[: len(bias)]


def _continued(ctx: Any, dtype: torch.dtype) -> GradientSum | None:
    """Returns the gradient to which a product adds; None if that is left to autograd.

    Autograd adds a gradient that was summed over devices just as well, unless it must be cast.
    """
    return continued(ctx.weight) if _adds(ctx, dtype) else None


def _adds(ctx: Any, dtype: torch.dtype) -> bool:
    """Returns whether a product may add a gradient itself; see `_continued`."""
    adds: bool = ctx.schedule.adds_gradients
    return adds or (ctx.sums[0] is None and dtype != ctx.weight.dtype)


def _left(ctx: Any, schedule: Schedule, a: Tensor, b: Tensor, whole: bool = False) -> bool:
    """Leaves the product Aᵀ B, a weight's gradient, to a weight pass, if one is open.

    `whole` says whether A is gathered.
    """
    late: LateGradient = ctx.late
    a, b, weight, adds = a.detach(), b.detach(), ctx.weight, _adds(ctx, a.dtype)

    def start() -> Started:
        into = continued(weight) if adds else None
        pending = schedule.atb(Operand(a, Pending(a) if whole else None), Operand(b), into)
        if schedule.adds_gradients:  # it is not summed over rows
            return _added(weight, pending, into)
        return lambda: _added(weight, pending, into)

    return late.leave(start)


def _multiplied_late(ctx: Any, whole: Operand, a: Operand, b: Operand, dtype: torch.dtype) -> bool:
    """Leaves the product Aᵀ B, a weight's gradient, to the product before, if that does it.

    It does so only if `whole` is gathered at once: chunks are to save memory.
    """
    later: DeferredSum | None = ctx.sums[0]
    if later is None or not later.late or whole.whole is None:
        return False
    schedule = ctx.schedule.in_backward
    return later.give(lambda: schedule.atb(a, b, _continued(ctx, dtype)))


def _weight_gradient(ctx: Any, gradient: Pending | None, into: GradientSum | None) -> Tensor | None:
    """Returns what `_added` returns; None if the gradient is left to the product before."""
    later: DeferredSum | None = ctx.sums[0]
    if gradient is None or (later is not None and later.give(gradient)):
        return None
    return _added(ctx.weight, gradient, into)


def _added(weight: Tensor, gradient: Pending, into: GradientSum | None) -> Tensor:
    """Waits for a weight's gradient, and adds it to that of earlier micro-batches.

    The gradient may have more columns than the weight. A product may have added it already.
    """
    if into is not None and into.begun:
        gradient.wait()
        return into.value
    term, n_columns = gradient.wait(), weight.shape[1]
    term = term if term.shape[1] == n_columns else term[:, :n_columns]
    if into is None:
        return term.to(weight.dtype)
    into.add(term)
    return into.value
