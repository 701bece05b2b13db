"""Products whose weight stays in place, while its input and its output are sent.

On an r x c grid, activations are sharded by tokens over columns and by h over rows between
sections. A weight is [in/r, out/c] where it opens a section and [in/c, out/r] where it closes one:

    opens    all-gather tokens over columns, multiply, reduce-scatter features over rows
    closes   all-gather features over rows, multiply, reduce-scatter tokens over columns

Inside a section a device has all T tokens and 1/(rc) of the width, whole heads of attention among
it. A pair of products receives per device (c-1)/(rc) (h_in + h_out) T + (r-1)/(rc) 2 f T elements
with f columns inside, and the gradient of a weight is complete on its device. Schatz, van de Geijn
and Poulson 2016 call it stationary A or B; Pope et al. 2022 generate text with PaLM 540B so.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gridformer.mesh import Axis
from gridformer.models.blocks.cast import cast
from gridformer.models.blocks.gradient_sum import continued
from gridformer.models.blocks.late_gradient import SPLIT, LateGradient
from gridformer.parallel.tensor.summa.autograd import Computed
from gridformer.parallel.tensor.summa.gathered import (
    OneHot,
    Replicated,
    add_bias,
    times,
    weight_operand,
)


@dataclass(frozen=True)
class WeightParts:
    """The columns of a weight on one column of devices, and which of them each row gets.

    With sub-grids in place of rows, those of a common weight, and which of them each branch gets.

    Attributes:
        rows: The axis over which they are divided.
        widths: How many columns each part of the weight has, such as q, k and v.
        blocks: Into how many blocks the rows divide each part. Where they are fewer than the rows,
            adjacent rows get the same block, such as a head of keys.
    """

    rows: Axis
    widths: tuple[int, ...]
    blocks: tuple[int, ...]

    @property
    def local(self) -> list[int]:
        """How many columns of each part a row gets."""
        return [width // n for width, n in zip(self.widths, self.blocks)]

    def by_rows(self, y: Tensor) -> Tensor:
        """Puts the columns of each row next to each other: [.., rows x sum of `local`]."""
        if len(self.widths) == 1 and self.blocks[0] == self.rows.size:
            return y
        columns = []
        for part, n in zip(y.split(list(self.widths), -1), self.blocks):
            each, copies = part.unflatten(-1, (n, -1)), self.rows.size // n
            columns.append(each if copies == 1 else each.repeat_interleave(copies, -2))
        return torch.cat(columns, -1).flatten(-2)

    def by_parts(self, y: Tensor) -> Tensor:
        """Returns the transpose of `by_rows`, which adds up columns that several rows got."""
        if len(self.widths) == 1 and self.blocks[0] == self.rows.size:
            return y
        parts = y.unflatten(-1, (self.rows.size, -1)).split(self.local, -1)
        columns = [x.unflatten(-2, (n, -1)).sum(-2) for x, n in zip(parts, self.blocks)]
        return torch.cat([x.flatten(-2) for x in columns], -1)


@dataclass(frozen=True)
class Ends:
    """How the input of a product is gathered, and how its output is summed.

    `parts` are those of a weight whose output is divided over rows by columns; None otherwise.
    """

    enter: Replicated
    leave: Replicated
    parts: WeightParts | None = None

    def of_product(self, grad: Tensor) -> Tensor:
        """Returns the gradient of x W, given that of the output, gathered."""
        return grad if self.parts is None else self.parts.by_parts(grad)

    def multiplied(self, whole: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the output for a gathered input [.., K]."""
        y = times(whole, weight_operand(weight, whole.dtype).local)
        if self.parts is None:
            out = self.leave.reduce_scatter(y).wait()
            return out if bias is None else out.add_(cast(bias, out.dtype))
        if bias is not None and self.parts.rows.index == 0:
            add_bias(y, bias)
        return self.leave.reduce_scatter(self.parts.by_rows(y)).wait()


def weight_stationary(
    x: Tensor, weight: Tensor, bias: Tensor | None, ends: Ends, keep_input: bool = False
) -> Tensor:
    """Computes y = x W + bias, differentiable; the weight and its gradient are not sent.

    Forward all-gather of x and reduce-scatter of y, backward all-gather of the gradient of y and
    reduce-scatter of that of x, and once more the all-gather of x unless `keep_input`.

    Args:
        x: This device's part of the input.
        weight: [K, N] for a gathered input [.., K].
        bias: [N] if `ends` has parts: the first row adds it before the sum, and alone has a
            gradient that is not zero. Otherwise that of this device's part of the output.
        keep_input: Whether the gathered input is kept for the backward pass.
    """
    gathered = x.detach()
    if keep_input:
        gathered = ends.enter.gather(gathered).wait()
    # Recomputation stops at the last tensor that is saved here: a block's last product is skipped.
    kept = gathered if keep_input else None
    late = LateGradient.of(weight) if SPLIT.wanted else None
    place = _Saved.apply(x, weight, bias, ends, kept, late)
    if not keep_input:
        gathered = ends.enter.gather(gathered).wait()
    out: Tensor = Computed.apply(place, lambda: ends.multiplied(gathered, weight, bias))
    return out


class _Saved(torch.autograd.Function):
    """Records a product for the backward pass before `Computed` computes it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ends: Ends,
        gathered: Tensor | None,
        late: LateGradient | None,
    ) -> Tensor:
        ctx.save_for_backward(x if gathered is None else gathered)
        ctx.late = late
        # The weight itself has a cast copy, which a recomputed saved tensor lacks.
        ctx.ends, ctx.weight, ctx.bias, ctx.kept = ends, weight, bias, gathered is not None
        parts, shape = ends.parts, ends.enter.full(x.shape)
        shape[-1] = weight.shape[1] if parts is None else parts.rows.size * sum(parts.local)
        return x.new_empty(()).expand(ends.leave.part(torch.Size(shape)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,), weight, ends = ctx.saved_tensors, ctx.weight, ctx.ends
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        arriving = ends.leave.gather(grads[0])
        late: LateGradient | None = ctx.late
        if wants_weight and late is not None:
            parts = x.detach(), grads[0]
            wants_weight = not late.leave(partial(_from_parts, weight, *parts, ends, ctx.kept))
        again = ends.enter.gather(x) if wants_weight and not ctx.kept else None
        grad = ends.of_product(arriving.wait())
        leaving = None
        if wants_x:
            local = weight_operand(weight, x.dtype).local
            leaving = ends.enter.reduce_scatter(times(grad, local.t()))
        grad_weight = grad_bias = None
        if wants_weight:
            grad_weight = _weight_gradient(weight, x if again is None else again.wait(), grad)
        if ctx.bias is not None:
            own = grads[0] if ends.parts is None else grad
            grad_bias = own.flatten(0, -2).sum(0, dtype=ctx.bias.dtype)
            if ends.parts is not None and ends.parts.rows.index:
                grad_bias.zero_()
        grad_x = None if leaving is None else leaving.wait()
        return grad_x, grad_weight, grad_bias, None, None, None


def _weight_gradient(weight: Tensor, x: Tensor, grad: Tensor) -> Tensor:
    """Returns the gradient of a weight, added to that of earlier micro-batches if possible."""
    rows, into = x.flatten(0, -2).t(), continued(weight)
    if into is None:
        return (rows @ grad.flatten(0, -2)).to(weight.dtype)
    into.add_product(rows, grad.flatten(0, -2))
    return into.value


def _from_parts(weight: Tensor, x: Tensor, grad: Tensor, ends: Ends, kept: bool) -> Tensor:
    """Gathers both factors of the gradient of a weight, unless x is `kept`, and returns it."""
    arriving, again = ends.leave.gather(grad), None if kept else ends.enter.gather(x)
    whole = ends.of_product(arriving.wait())
    return _weight_gradient(weight, x if again is None else again.wait(), whole)


def stationary_lookup(tokens: Tensor, table: Tensor, first: int, boundary: Replicated) -> Tensor:
    """Looks up the table's rows of all tokens, differentiable with respect to the table.

    Forward reduce-scatter by tokens, backward all-gather of the gradient.

    Args:
        tokens: All token ids [b, s].
        table: Rows [v/c, h/r] of the table, beginning with that of word `first`.
        boundary: How tokens are sharded over columns.

    Returns:
        This device's tokens, and columns h/r.
    """
    out: Tensor = _Lookup.apply(tokens, table, first, boundary)
    return out


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, table: Tensor, first: int, boundary: Replicated
    ) -> Tensor:
        ctx.one_hot, ctx.boundary = OneHot(tokens, first, table.shape[0]), boundary
        return boundary.reduce_scatter(ctx.one_hot.rows_of(table)).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = ctx.boundary.gather(grads[0]).wait()
        return None, ctx.one_hot.added_up(grad), None, None
