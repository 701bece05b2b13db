"""The products as autograd sees them. The set is closed under differentiation:

    C = A B     dA = dC Bᵀ    dB = Aᵀ dC
    C = A Bᵀ    dA = dC B     dB = dCᵀ A
    C = Aᵀ B    dA = B dCᵀ    dB = A dC

Backward, both gradients' operands are asked for first, and the first gradient's sum travels while
the second is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gridformer import comm
from gridformer.comm import Axes, Pending
from gridformer.models.blocks.recompute import in_backward
from gridformer.parallel.ends import LABEL
from gridformer.parallel.summa.gather import Gather
from gridformer.parallel.summa.norms import Normed, normalise, normalise_backward
from gridformer.parallel.summa.operands import OneHotOperand, Operand
from gridformer.parallel.summa.schedules import Schedule


class WeightCell:
    """What is gathered of one product's weight beyond one use of it, between `open` and `close`.

    keeps: the whole of the weight's column, from the first product with it until `close`. Without,
    it may be asked for early, by the product before (`fetch`), and is let go of when it is used.
    Nothing outlasts `close`: only who knows that weights do not change opens a cell.
    """

    def __init__(self, keeps: bool = True) -> None:
        self.keeps = keeps
        self.source: Callable[[], tuple[Tensor, Schedule]] | None = None  # for `fetch`
        self.after: WeightCell | None = None  # the next product's, in forward order
        self.before: WeightCell | None = None
        self.ends_block = False  # the next product is of another block
        self._open = False
        self._operands: dict[torch.dtype, Operand] = {}

    def operand(self, weight: Tensor, dtype: torch.dtype) -> Operand:
        if not self._open:
            return Operand(weight.to(dtype))
        if not self.keeps:
            return self._operands.pop(dtype, None) or Operand(weight.to(dtype))
        if dtype not in self._operands:
            self._operands[dtype] = Operand(weight.to(dtype))
        return self._operands[dtype]

    def fetch(self, dtype: torch.dtype) -> None:
        """Start to gather the weight: the product before this one is about to multiply."""
        if not self._open or self.source is None or dtype in self._operands:
            return
        weight, schedule = self.source()
        self._operands[dtype] = Operand(weight.to(dtype))
        schedule.ahead(None, self._operands[dtype])

    def open(self) -> None:
        self._open = True

    def close(self) -> None:
        self._open = False
        self._operands = {}


@dataclass
class Keep:
    """What of a product's gathered operands is kept: its input for the backward pass, its weight
    for the whole step. What is not kept is gathered again when it is needed again."""

    input: bool = False
    weight: WeightCell | None = None

    def weight_operand(self, weight: Tensor, dtype: torch.dtype) -> Operand:
        if self.weight is None:
            return Operand(weight.to(dtype))
        return self.weight.operand(weight, dtype)

    def fetch_after(self, dtype: torch.dtype) -> None:
        """While this product multiplies, the next one's weight may travel. Not that of the next
        block where this one is computed again: backward has left that behind."""
        if self.weight is None or self.weight.after is None:
            return
        if not (self.weight.ends_block and in_backward()):
            self.weight.after.fetch(dtype)

    def fetch_before(self, dtype: torch.dtype) -> None:
        """The same in the backward pass, where the product before this one is the next."""
        if self.weight is not None and self.weight.before is not None:
            self.weight.before.fetch(dtype)


NOTHING = Keep()


def product_ab(
    a: Tensor | Normed,
    b: Tensor,
    schedule: Schedule,
    bias: Tensor | None = None,
    keep: Keep = NOTHING,
) -> Tensor:
    """Differentiable C = A B + bias. a [.., K/c], b [K/r, N/c], bias [N/c]; result [.., N/c].

    The input stays behind; A travels along the rows. A `Normed` a needs the schedule `Gather`: the
    rows are gathered first and normalised whole, so that the norm itself sends nothing.
    """
    if isinstance(a, Normed):
        norm = a.norm
        out: Tensor = _NormedAB.apply(
            a.x, norm.weight, norm.bias, b, bias, norm.eps, schedule, keep
        )
        return out
    operand = Operand(a)

    def compute() -> Tensor:
        weight = keep.weight_operand(b, a.dtype)
        schedule.ahead(operand, weight)
        keep.fetch_after(a.dtype)
        c = schedule.ab(operand, weight).wait()
        if bias is not None:
            c += bias.to(c.dtype)
        return c

    place = _AB.apply(a, b, bias, schedule, keep, operand)
    out = _Carry.apply(place, compute)
    return out


def product_abt(
    a: Tensor, b: Tensor, schedule: Schedule, bias: Tensor | None = None, keep: Keep = NOTHING
) -> Tensor:
    """Differentiable C = A Bᵀ + bias. a [.., K/c], b [N/r, K/c], bias [N/c]; result [.., N/c].

    A stays where it is; terms of C travel along the rows, summed.
    """

    def compute() -> Tensor:
        weight = keep.weight_operand(b, a.dtype)
        schedule.ahead(None, weight)
        keep.fetch_after(a.dtype)
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
    keep: Keep = NOTHING,
) -> Tensor:
    """Differentiable rows of a table for tokens [...] that are equal along a row: [..., h/c].

    The one-hot matrix of the tokens times the table: C = A B with table [v/r, h/c], or
    (`output_stays` false) C = A Bᵀ with table [h/r, v/c]. Nothing of the one-hot matrix travels.
    """
    out: Tensor = _Lookup.apply(tokens, table, schedule, axes, output_stays, keep)
    return out


def whole_column(b: Tensor, dtype: torch.dtype, schedule: Gather, keep: Keep = NOTHING) -> Tensor:
    """Differentiable: all of a weight's column in `dtype`, [K/r, N/c] to [K, N/c].

    For several products in turn, on a grid of one row: the weight travels once for all of them, and
    so does the sum of its gradients.
    """
    out: Tensor = _WholeColumn.apply(b, dtype, schedule, keep)
    return out


class _WholeColumn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, b: Tensor, dtype: torch.dtype, schedule: Gather, keep: Keep) -> Tensor:
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
        keep: Keep,
        operand: Operand,
    ) -> Tensor:
        if keep.input:
            schedule.ahead(operand, None)
        ctx.whole = keep.input and operand.whole is not None
        ctx.save_for_backward(operand.whole.wait() if ctx.whole else a, b)  # type: ignore[union-attr]
        ctx.schedule, ctx.keep, ctx.bias = schedule, keep, _type_of(bias)
        return schedule.ab_stand_in(a, b.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        a, b = ctx.saved_tensors
        schedule, grad = ctx.schedule, Operand(grads[0])
        wants_a, wants_b = ctx.needs_input_grad[:2]
        operand = Operand(a, Pending(a) if ctx.whole else None)
        weight = ctx.keep.weight_operand(b, a.dtype)
        schedule.ahead(operand if wants_b else None, weight if wants_a else None)
        ctx.keep.fetch_before(a.dtype)
        grad_a = schedule.abt(grad, weight) if wants_a else None
        del weight  # and what was gathered of it
        grad_b = schedule.atb(operand, grad) if wants_b else None
        grad_bias = _bias_gradient(grads[0], ctx.bias)
        # The weight's first: what is left to multiply for it is done while both sums travel.
        weight_gradient = _wait(grad_b, b.dtype)
        return _wait(grad_a, a.dtype), weight_gradient, grad_bias, None, None, None


class _ABt(torch.autograd.Function):
    """Records C = A Bᵀ + bias for the backward pass; `_Carry` computes it, after. See _AB."""

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        schedule: Schedule,
        keep: Keep,
    ) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.schedule, ctx.keep, ctx.bias = schedule, keep, _type_of(bias)
        return schedule.abt_stand_in(a, b.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        a, b = ctx.saved_tensors
        schedule, grad = ctx.schedule, Operand(grads[0])
        wants_a, wants_b = ctx.needs_input_grad[:2]
        weight = ctx.keep.weight_operand(b, a.dtype)
        schedule.ahead(grad, weight if wants_a else None)
        ctx.keep.fetch_before(a.dtype)
        grad_a: Pending | None
        grad_b: Pending | None
        if isinstance(schedule, Gather) and wants_a and wants_b:  # whole lines serve both
            grad_a, grad_b = schedule.ab_and_atb(grad, weight, a)
        else:
            grad_b = schedule.atb(grad, Operand(a)) if wants_b else None
            grad_a = schedule.ab(grad, weight) if wants_a else None
        del weight  # and what was gathered of it
        grad_bias = _bias_gradient(grads[0], ctx.bias)
        return _wait(grad_a, a.dtype), _wait(grad_b, b.dtype), grad_bias, None, None


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
        return _wait(grad_a, a.dtype), _wait(grad_b, b.dtype), None


class _NormedAB(torch.autograd.Function):
    """C = norm(X) B. X is gathered along the rows, each device normalises whole rows."""

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
        keep: Keep,
    ) -> Tensor:
        weight = keep.weight_operand(b, x.dtype)
        operand = Operand(x)
        schedule.ahead(operand, weight)
        keep.fetch_after(x.dtype)

        def normed(whole: Tensor) -> Tensor:
            return normalise(whole, norm_weight, norm_bias, eps)[0]

        kept = schedule.whole_row(operand) if keep.input else x
        c = schedule.ab(operand, weight, normed).wait()
        if bias is not None:
            c += bias.to(c.dtype)
        ctx.save_for_backward(kept, norm_weight, norm_bias, b)
        ctx.schedule, ctx.keep, ctx.eps, ctx.bias = schedule, keep, eps, _type_of(bias)
        return c

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, norm_weight, norm_bias, b = ctx.saved_tensors
        schedule = ctx.schedule
        weight = ctx.keep.weight_operand(b, x.dtype)
        operand = Operand(x, Pending(x) if ctx.keep.input else None)
        schedule.ahead(operand, weight)
        ctx.keep.fetch_before(x.dtype)
        column = schedule.whole_column(weight).t()
        del weight
        shape = torch.Size((*grads[0].shape[:-1], column.shape[1]))
        sums = schedule.sums(shape, x)
        terms_b = schedule.weight_gradient(operand)
        of_norm: list[tuple[Tensor, Tensor | None]] = []
        for lines, arriving in schedule.arriving(operand):
            grad = schedule.lines(grads[0], lines)
            # Terms of the norm's gradient: this device's columns of B have seen all of a row. A
            # norm's gradient is linear in its output's, so they pass through it and are summed.
            terms = grad @ column
            if schedule.is_last(lines, shape):
                del column  # what was gathered of the weight
            x_whole = arriving.wait()
            del arriving
            normed, statistics = normalise(x_whole, norm_weight, norm_bias, ctx.eps)
            terms_x, terms_weight, terms_bias = normalise_backward(
                terms, x_whole, norm_weight, norm_bias, statistics
            )
            del terms, x_whole
            of_norm.append((terms_weight, terms_bias))
            sums.start(lines, terms_x.to(x.dtype))
            del terms_x
            terms_b.add(normed, grad)
            del normed
        grad_x, grad_b = sums.pending(), terms_b.pending()
        grad_norm_weight = _added_up([weight for weight, _ in of_norm])
        grad_norm_bias = None
        if norm_bias is not None:
            grad_norm_bias = _added_up([bias for _, bias in of_norm if bias is not None])
        grad_bias = _bias_gradient(grads[0], ctx.bias)
        weight_gradient = _wait(grad_b, b.dtype)  # first, as in _AB
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


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        table: Tensor,
        schedule: Schedule,
        axes: Axes,
        output_stays: bool,
        keep: Keep,
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


def _added_up(terms: list[Tensor]) -> Tensor:
    return terms[0] if len(terms) == 1 else torch.stack(terms).sum(0)


def _bias_gradient(grad: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    return None if dtype is None else grad.flatten(0, -2).sum(0).to(dtype)


def _type_of(bias: Tensor | None) -> torch.dtype | None:
    return None if bias is None else bias.dtype


def _wait(gradient: Pending | None, dtype: torch.dtype) -> Tensor | None:
    return None if gradient is None else gradient.wait().to(dtype)
