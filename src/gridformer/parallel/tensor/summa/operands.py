"""What a product is made of: blocks of matrices, and what has been gathered of them already."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gridformer.comm import Pending
from gridformer.mesh import Axis


@dataclass(frozen=True)
class OneHot:
    """The columns [first, first + size) of the one-hot matrix of tokens, as far as products need.

    tokens: any shape [...]; the matrix is [..., size], and is never built.
    """

    tokens: Tensor
    first: int
    size: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.tokens.shape, self.size))

    def columns(self, start: int, stop: int) -> OneHot:
        """Other columns of the same matrix, counted from the vocabulary's beginning."""
        return OneHot(self.tokens, start, stop - start)

    def rows_of(self, table: Tensor) -> Tensor:
        """This matrix times [size, N]: rows of a table, zero for tokens of other columns."""
        here, local = self._here()
        rows = F.embedding(local, table)
        return rows.mul_(here.unsqueeze(-1).to(rows.dtype))

    def added_up(self, grad: Tensor) -> Tensor:
        """This matrix's transpose times [..., N]: rows added up by token, [size, N]."""
        here, local = self._here()
        grad = (grad * here.unsqueeze(-1).to(grad.dtype)).flatten(0, -2)
        return grad.new_zeros((self.size, grad.shape[-1])).index_add_(0, local.flatten(), grad)

    def _here(self) -> tuple[Tensor, Tensor]:
        """Which tokens are of these columns, and which of them (0 for the others)."""
        local = self.tokens - self.first
        here = (local >= 0) & (local < self.size)
        return here, torch.where(here, local, 0)


Matrix = Tensor | OneHot


class Operand:
    """A matrix cut over the grid: this device's block, and the whole of its row or column.

    An activation [.., K/c] is made whole along its row of devices, a weight [K/r, N/c] down its
    column. Neither is ever needed both ways, so one `whole` serves.
    """

    def __init__(self, local: Matrix, whole: Pending | None = None) -> None:
        self.local, self.whole = local, whole


def tensor_of(operand: Operand) -> Tensor:
    """This device's block, which must be a tensor."""
    assert isinstance(operand.local, Tensor)
    return operand.local


class OneHotOperand(Operand):
    """The one-hot matrix of tokens that every device of a row knows: nothing of it travels."""

    def __init__(self, tokens: Tensor, size: int, col: Axis) -> None:
        part = size // col.size
        self.all = OneHot(tokens, 0, size)
        super().__init__(self.all.columns(col.index * part, (col.index + 1) * part))


def columns(a: Matrix, start: int, stop: int) -> Matrix:
    """Of a whole matrix [.., M], the columns [start, stop)."""
    return a.columns(start, stop) if isinstance(a, OneHot) else a[..., start:stop]


def times(a: Matrix, b: Tensor) -> Tensor:
    """a [.., K] times b [K, N]."""
    return a.rows_of(b) if isinstance(a, OneHot) else a @ b


def transposed_times(a: Matrix, b: Matrix) -> Tensor:
    """The transpose of a [.., M] times b [.., N], leading dimensions alike: [M, N]."""
    if isinstance(a, OneHot):
        assert isinstance(b, Tensor)
        return a.added_up(b)
    if isinstance(b, OneHot):
        return b.added_up(a).t()
    return a.flatten(0, -2).t() @ b.flatten(0, -2)


def add_times(c: Tensor, a: Matrix, b: Tensor) -> Tensor:
    """c [.., N] += a [.., K] times b [K, N], in place."""
    if isinstance(a, OneHot):
        c += times(a, b)
    else:
        c.view(-1, b.shape[1]).addmm_(a.flatten(0, -2), b)
    return c


def times_into(out: Tensor, a: Matrix, b: Tensor) -> None:
    """out = a [.., K] times b [K, N]."""
    if isinstance(a, OneHot):
        out.copy_(times(a, b))
    else:
        torch.matmul(a, b, out=out)


def transposed_times_into(out: Tensor, a: Matrix, b: Matrix) -> None:
    """out = the transpose of a [.., M] times b [.., N]."""
    if isinstance(a, OneHot) or isinstance(b, OneHot):
        out.copy_(transposed_times(a, b))
    else:
        torch.mm(a.flatten(0, -2).t(), b.flatten(0, -2), out=out)


# What backward passes do with results that may still be on their way.


def bias_gradient(grad: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    """Of a bias [N] of that type, if there is one, added to what has the gradient [.., N]."""
    return None if dtype is None else grad.flatten(0, -2).sum(0).to(dtype)


def arrived(gradient: Pending | None, dtype: torch.dtype) -> Tensor | None:
    """A gradient in the type of what it is of, if one is wanted."""
    return None if gradient is None else gradient.wait().to(dtype)


def type_of(bias: Tensor | None) -> torch.dtype | None:
    return None if bias is None else bias.dtype
