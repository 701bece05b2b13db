"""Operands of the products: blocks of matrices, what was gathered of them, and one-hot matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from gridformer.comm import Pending
from gridformer.mesh import Axis
from gridformer.models.blocks.cast import cast
from gridformer.models.blocks.gradient_sum import MainGrad, continued
from gridformer.models.blocks.linear import as_rows


@dataclass(frozen=True)
class OneHot:
    """Columns [first, first + size) of the one-hot matrix of token ids.

    The matrix [..., size] of `tokens` [...] is never materialized: the products below index rows
    instead.
    """

    tokens: Tensor
    first: int
    size: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.tokens.shape, self.size))

    def columns(self, start: int, stop: int) -> OneHot:
        """Returns columns [start, stop) of the same matrix, in the order of the vocabulary."""
        return OneHot(self.tokens, start, stop - start)

    def rows_of(self, table: Tensor) -> Tensor:
        """Multiplies this matrix by a table [size, N]: [..., N].

        The result has the row of each token, and zeros for tokens outside these columns.
        """
        here, local = self._here()
        rows = F.embedding(local, table)
        return rows.mul_(here.unsqueeze(-1).to(rows.dtype))

    def added_up(self, grad: Tensor) -> Tensor:
        """Multiplies this matrix's transpose by grad [..., N]: rows summed by token, [size, N]."""
        here, local = self._here()
        grad = (grad * here.unsqueeze(-1).to(grad.dtype)).flatten(0, -2)
        return grad.new_zeros((self.size, grad.shape[-1])).index_add_(0, local.flatten(), grad)

    def _here(self) -> tuple[Tensor, Tensor]:
        """Returns whether each token is in these columns, and its local column (0 if not)."""
        local = self.tokens - self.first
        here = (local >= 0) & (local < self.size)
        return here, torch.where(here, local, 0)


Matrix = Tensor | OneHot


class AddsGradients(Protocol):
    """A schedule that says whether its products add to gradients where they multiply."""

    @property
    def adds_gradients(self) -> bool: ...


class Operand:
    """A matrix sharded over the grid: this device's block, and what was gathered of it so far.

    An activation [.., K/c] is only ever gathered along its row of devices, and a weight [K/r, N/c]
    only down its column, so one field `whole` serves both.
    """

    def __init__(self, local: Matrix, whole: Pending | None = None) -> None:
        self.local, self.whole = local, whole


def tensor_of(operand: Operand) -> Tensor:
    """Returns this device's block, which must be a tensor and not a one-hot matrix."""
    assert isinstance(operand.local, Tensor)
    return operand.local


class OneHotOperand(Operand):
    """The one-hot matrix of tokens [...]. All devices of a row hold the tokens: nothing is sent.

    Args:
        tokens: Token ids, equal along a row of devices.
        size: Padded size of the vocabulary, divisible by the size of `col`.
    """

    def __init__(self, tokens: Tensor, size: int, col: Axis) -> None:
        part = size // col.size
        self.all = OneHot(tokens, 0, size)
        super().__init__(self.all.columns(col.index * part, (col.index + 1) * part))


def columns(a: Matrix, start: int, stop: int) -> Matrix:
    """Returns columns [start, stop) of a full matrix [.., M]."""
    return a.columns(start, stop) if isinstance(a, OneHot) else a[..., start:stop]


def times(a: Matrix, b: Tensor) -> Tensor:
    """Multiplies a [.., K] by b [K, N]: [.., N]."""
    return a.rows_of(b) if isinstance(a, OneHot) else as_rows(a) @ b


def transposed_times(a: Matrix, b: Matrix) -> Tensor:
    """Multiplies the transpose of a [.., M] by b [.., N]: [M, N], summed over leading dims."""
    if isinstance(a, OneHot):
        assert isinstance(b, Tensor)
        return a.added_up(b)
    if isinstance(b, OneHot):
        return b.added_up(a).t()
    return a.flatten(0, -2).t() @ b.flatten(0, -2)


def accumulator(x: Tensor) -> Tensor:
    """Returns x in the dtype of accumulators: float32, or that of x if it is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def add_times(c: Tensor, a: Matrix, b: Tensor) -> Tensor:
    """Adds a [.., K] times b [K, N] to c [.., N] in place, and returns c.

    c may have a wider type than b.
    """
    if isinstance(a, OneHot) or c.dtype != b.dtype:
        c += times(a, b)
    else:
        c.view(-1, b.shape[1]).addmm_(a.flatten(0, -2), b)
    return c


def add_bias(c: Tensor, bias: Tensor | None) -> Tensor:
    """Adds a bias [N] to the first N columns of c [.., N] in place, and returns c."""
    if bias is not None:
        _columns(c, len(bias)).add_(cast(bias, c.dtype))
    return c


def times_into(out: Tensor, a: Matrix, b: Tensor) -> None:
    """Writes a [.., K] times b [K, N] to out [.., N]."""
    if isinstance(a, OneHot):
        out.copy_(times(a, b))
    else:
        torch.matmul(a, b, out=out)


def transposed_times_into(out: Tensor, a: Matrix, b: Matrix) -> None:
    """Writes the transpose of a [.., M] times b [.., N] to out [M, N]."""
    if isinstance(a, OneHot) or isinstance(b, OneHot):
        out.copy_(transposed_times(a, b))
    else:
        torch.mm(a.flatten(0, -2).t(), b.flatten(0, -2), out=out)


def add_transposed_times(into: MainGrad, a: Matrix, b: Matrix) -> Tensor:
    """Adds the transpose of a [.., M] times b [.., N] to a gradient [M, N], and returns that."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        into.add_product(a.flatten(0, -2).t(), b.flatten(0, -2))
    else:
        into.add(transposed_times(a, b))
    return into.result()


def _columns(x: Tensor, n: int | None) -> Tensor:
    """Returns the first n columns of x, a view if there are more, and x itself if n is None."""
    return x if n is None or x.shape[-1] == n else x[..., :n]


# Helpers of the backward passes, whose results may still be in flight.


def bias_gradient(grad: Tensor, bias: tuple[torch.dtype, int] | None) -> Tensor | None:
    """Returns the gradient [N] of a bias.

    Args:
        grad: The output's gradient [.., N], which may have additional columns.
        bias: The dtype of the bias, and N; None if there is none.
    """
    if bias is None:
        return None
    dtype, n_columns = bias
    return _columns(grad.flatten(0, -2).sum(0), n_columns).to(dtype)


def arrived(
    gradient: Pending | None, dtype: torch.dtype, n_columns: int | None = None
) -> Tensor | None:
    """Waits for a gradient and casts it to the dtype of its variable; None if none is wanted.

    Args:
        gradient: The gradient [.., N], which may have additional columns.
        dtype: The dtype of its variable.
        n_columns: N, if there are additional columns.
    """
    return None if gradient is None else _columns(gradient.wait(), n_columns).to(dtype)


def continued_by(schedule: AddsGradients, weight: Tensor, dtype: torch.dtype) -> MainGrad | None:
    """Returns the gradient to which a product adds; None if that is left to autograd.

    A gradient that was summed over devices is added by autograd just as well, unless it must be
    cast.

    Args:
        schedule: The schedule of the product.
        weight: The weight.
        dtype: The type of the product.
    """
    if schedule.adds_gradients or dtype != weight.dtype:
        return continued(weight)
    return None


def weight_gradient(
    gradient: Pending | None, into: MainGrad | None, dtype: torch.dtype, n_columns: int
) -> Tensor | None:
    """Waits for a weight's gradient, and adds it to that of earlier micro-batches.

    Args:
        gradient: As for `arrived`.
        into: The sum to which it is added, if a product has not added it already.
        dtype: As for `arrived`.
        n_columns: As for `arrived`.
    """
    if gradient is None or into is None:
        return arrived(gradient, dtype, n_columns)
    term = gradient.wait()
    if not into.begun:
        into.add(_columns(term, n_columns))
    return into.result()


def type_of(bias: Tensor | None) -> tuple[torch.dtype, int] | None:
    """Returns what `bias_gradient` needs to know about a bias."""
    return None if bias is None else (bias.dtype, len(bias))
