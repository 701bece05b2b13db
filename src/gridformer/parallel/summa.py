"""The three SUMMA products of 2-D tensor parallelism, and their gradients.

Van de Geijn and Watts 1997; Optimus (Xu, Li, Gong, You 2021), algorithms 1 to 3, here on any
r x c grid. A matrix [M, K] lies with M cut over the rows and K over the columns, so device (i, j)
holds [M/r, K/c]. The set is closed under differentiation:

    C = A B     dA = dC Bᵀ    dB = Aᵀ dC
    C = A Bᵀ    dA = dC B     dB = dCᵀ A
    C = Aᵀ B    dA = B dCᵀ    dB = A dC

A dimension that is cut c ways in one operand and r ways in the other is walked in the panels of
the common refinement, r + c - gcd(r, c) of them: each panel has one owner column and one owner row.
This is the paper's `broadcast` schedule: each panel is broadcast just before it is multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gridformer import comm
from gridformer.comm import Axes, Axis

_LABEL = "product"


@dataclass(frozen=True)
class Panel:
    """The range [start, stop) of a dimension, and where it lies within its owners' blocks."""

    col: int  # owner column, and the range within its block
    row: int  # owner row, and the range within its block
    in_col: slice
    in_row: slice
    width: int


def panels(size: int, rows: int, cols: int) -> Iterator[Panel]:
    """The common refinement of cutting `size` over `rows` and over `cols`, in order.

    `size` must divide by both.
    """
    per_row, per_col = size // rows, size // cols
    cuts = sorted({*range(0, size, per_row), *range(0, size, per_col), size})
    for start, stop in pairwise(cuts):
        col, row = start // per_col, start // per_row
        yield Panel(
            col=col,
            row=row,
            in_col=slice(start - col * per_col, stop - col * per_col),
            in_row=slice(start - row * per_row, stop - row * per_row),
            width=stop - start,
        )


def ab(a: Tensor, b: Tensor, axes: Axes) -> Tensor:
    """C = A B. a [M/r, K/c], b [K/r, N/c], result [M/r, N/c]."""
    c = a.new_zeros((a.shape[0], b.shape[1]))
    for p in panels(a.shape[1] * axes.col.size, axes.row.size, axes.col.size):
        a_panel = _receive(a[:, p.in_col], (a.shape[0], p.width), axes.col, p.col)
        b_panel = _receive(b[p.in_row], (p.width, b.shape[1]), axes.row, p.row)
        c.addmm_(a_panel, b_panel)
    return c


def abt(a: Tensor, b: Tensor, axes: Axes) -> Tensor:
    """C = A Bᵀ. a [M/r, K/c], b [N/r, K/c], result [M/r, N/c]."""
    rows, cols = axes.row.size, axes.col.size
    size = b.shape[0] * rows
    c = a.new_empty((a.shape[0], size // cols))
    for p in panels(size, rows, cols):
        b_panel = _receive(b[p.in_row], (p.width, b.shape[1]), axes.row, p.row)
        total = comm.reduce(a @ b_panel.t(), axes.col, p.col, _LABEL)
        if axes.col.index == p.col:
            c[:, p.in_col] = total
    return c


def atb(a: Tensor, b: Tensor, axes: Axes) -> Tensor:
    """C = Aᵀ B. a [K/r, M/c], b [K/r, N/c], result [M/r, N/c]."""
    rows, cols = axes.row.size, axes.col.size
    size = a.shape[1] * cols
    c = a.new_empty((size // rows, b.shape[1]))
    for p in panels(size, rows, cols):
        a_panel = _receive(a[:, p.in_col], (a.shape[0], p.width), axes.col, p.col)
        total = comm.reduce(a_panel.t() @ b, axes.row, p.row, _LABEL)
        if axes.row.index == p.row:
            c[p.in_row] = total
    return c


def _receive(mine: Tensor, shape: tuple[int, int], axis: Axis, root: int) -> Tensor:
    """The panel of `root`. `mine` is read on the root alone; elsewhere it may be out of range."""
    if axis.index == root:
        panel = mine.contiguous()
    else:
        panel = mine.new_empty(shape)
    return comm.broadcast(panel, axis, root, _LABEL)


class _AB(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, axes: Axes) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.axes = axes
        return ab(a, b, axes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (a, b), grad = ctx.saved_tensors, grads[0]
        grad_a = abt(grad, b, ctx.axes) if ctx.needs_input_grad[0] else None
        grad_b = atb(a, grad, ctx.axes) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b, None


class _ABt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, axes: Axes) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.axes = axes
        return abt(a, b, axes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (a, b), grad = ctx.saved_tensors, grads[0]
        grad_a = ab(grad, b, ctx.axes) if ctx.needs_input_grad[0] else None
        grad_b = atb(grad, a, ctx.axes) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b, None


class _AtB(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, axes: Axes) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.axes = axes
        return atb(a, b, axes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (a, b), grad = ctx.saved_tensors, grads[0]
        grad_a = abt(b, grad, ctx.axes) if ctx.needs_input_grad[0] else None
        grad_b = ab(a, grad, ctx.axes) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b, None


def product_ab(a: Tensor, b: Tensor, axes: Axes) -> Tensor:
    """Differentiable C = A B; a [..., K/c] with the leading dimensions folded into M/r."""
    out: Tensor = _AB.apply(a.flatten(0, -2), b, axes)
    return out.view(*a.shape[:-1], out.shape[-1])


def product_abt(a: Tensor, b: Tensor, axes: Axes) -> Tensor:
    """Differentiable C = A Bᵀ; a [..., K/c] with the leading dimensions folded into M/r."""
    out: Tensor = _ABt.apply(a.flatten(0, -2), b, axes)
    return out.view(*a.shape[:-1], out.shape[-1])


def product_atb(a: Tensor, b: Tensor, axes: Axes) -> Tensor:
    """Differentiable C = Aᵀ B of matrices."""
    out: Tensor = _AtB.apply(a, b, axes)
    return out


class _OneHotTimesTable(torch.autograd.Function):
    """C = A B where A is the one-hot form of tokens: no panel of A travels, every device has it."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor, axes: Axes) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.axes, ctx.shape = axes, table.shape
        rows = table.shape[0]
        out = table.new_zeros((*tokens.shape, table.shape[1]))
        for owner in range(axes.row.size):
            panel = _receive(table, (rows, table.shape[1]), axes.row, owner)
            here = (tokens >= owner * rows) & (tokens < (owner + 1) * rows)
            out[here] = panel[tokens[here] - owner * rows]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (tokens,), grad = ctx.saved_tensors, grads[0]
        axes, (rows, width) = ctx.axes, ctx.shape
        mine = grad.new_empty(())
        for owner in range(axes.row.size):
            here = (tokens >= owner * rows) & (tokens < (owner + 1) * rows)
            panel = grad.new_zeros((rows, width))
            panel.index_add_(0, tokens[here] - owner * rows, grad[here])
            panel = comm.reduce(panel, axes.row, owner, _LABEL)
            if axes.row.index == owner:
                mine = panel
        return None, mine, None


def one_hot_product(tokens: Tensor, table: Tensor, axes: Axes) -> Tensor:
    """Rows of a table [V/r, h/c] for tokens [...], equal along a row of devices: [..., h/c]."""
    out: Tensor = _OneHotTimesTable.apply(tokens, table, axes)
    return out
