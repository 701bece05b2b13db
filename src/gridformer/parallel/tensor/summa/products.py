"""The three matrix products of SUMMA, panel by panel: C = A B, C = A Bᵀ and C = Aᵀ B.

These are algorithms 1 to 3 of Optimus (Xu, Li, Gong, You 2021), after van de Geijn and
Watts 1997. A matrix [M, K] lies with M cut over the rows of the grid and K over its columns: device
(i, j) holds the block [M/r, K/c]. A loop runs over panels l of the dimension that the operands cut
differently:

    algorithm  product    along row i of devices     down column j of devices
    1          C = A B    broadcast A_il             broadcast B_lj             C_ij += A_il B_lj
    2          C = A Bᵀ   sum A_ij B_ljᵀ to C_il     broadcast B_lj
    3          C = Aᵀ B   broadcast A_il             sum A_ilᵀ B_ij to C_lj

The paper's grid is square, and panel l is block l of both operands. Here it has any r rows and c
columns: a panel is a range that lies within one block of each (`panels`), so it has one owner among
the rows, `panel.row`, and one among the columns, `panel.col`. Activations may have several leading
dimensions, which count as M.

How a panel travels, and how many at a time, is the business of `PanelTransport`. What the products
have as gradients is in `autograd`, where each of them is one of the three again.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from gridformer.comm import Pending
from gridformer.mesh import Axes
from gridformer.parallel.tensor.summa.operands import (
    Operand,
    add_times,
    tensor_of,
    times,
    times_into,
    transposed_times_into,
)
from gridformer.parallel.tensor.summa.transport import PanelTransport


class Schedule(Protocol):
    """How products communicate. Results may still be on their way."""

    def ab(self, a: Operand, b: Operand) -> Pending:
        """C = A B. a [.., K/c], b [K/r, N/c], result [.., N/c]."""

    def abt(self, a: Operand, b: Operand) -> Pending:
        """C = A Bᵀ. a [.., K/c], b [N/r, K/c], result [.., N/c]."""

    def atb(self, a: Operand, b: Operand) -> Pending:
        """C = Aᵀ B. a [.., M/c], b [.., N/c], leading dimensions alike; result [M/r, N/c]."""

    def empty_ab_like(self, a: Tensor, b_columns: int) -> Tensor:
        """For A B, b having so many columns: its shape and type without its memory."""

    def empty_abt_like(self, a: Tensor, b_rows: int) -> Tensor:
        """The same of A Bᵀ, b having so many rows."""

    def prefetch(self, activation: Operand | None, weight: Operand | None) -> None:
        """A hint: these will be needed whole. A schedule may start to gather them."""


class Broadcast:
    """The paper's schedule: a panel is broadcast just before it is multiplied, a sum is reduced
    just after.

    `in_flight` panels are on their way while one is multiplied: 0 here, 1 in `Pipelined`.
    """

    in_flight = 0

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self.transport = PanelTransport(axes, self.in_flight)

    def ab(self, a: Operand, b: Operand) -> Pending:
        """Algorithm 1: for every l, C_ij += A_il B_lj."""
        k = tensor_of(b).shape[0] * self.axes.row.size
        c: Tensor | None = None
        for _, a_il, b_lj in self.transport.broadcast(k, along_rows=a, down_columns=b):
            c = times(a_il, b_lj) if c is None else add_times(c, a_il, b_lj)
        assert c is not None
        return Pending(c)

    def abt(self, a: Operand, b: Operand) -> Pending:
        """Algorithm 2: for every l, C_il = sum over j of A_ij B_ljᵀ, on the owner of column l."""
        b_ij = tensor_of(b)
        n = b_ij.shape[0] * self.axes.row.size
        c = b_ij.new_empty((*a.local.shape[:-1], n // self.axes.col.size))
        sums = self.transport.reduce(self.axes.col)
        for panel, _, b_lj in self.transport.broadcast(n, down_columns=b):
            terms = sums.room((*c.shape[:-1], panel.width), b_ij)
            times_into(terms, a.local, b_lj.t())
            sums.start(terms, panel.col, c[..., panel.in_col])
        sums.finish()
        return Pending(c)

    def atb(self, a: Operand, b: Operand) -> Pending:
        """Algorithm 3: for every l, C_lj = sum over i of A_ilᵀ B_ij, on the owner of row l."""
        like = a.local if isinstance(a.local, Tensor) else tensor_of(b)
        m, n = a.local.shape[-1] * self.axes.col.size, b.local.shape[-1]
        c = like.new_empty((m // self.axes.row.size, n))
        sums = self.transport.reduce(self.axes.row)
        for panel, a_il, _ in self.transport.broadcast(m, along_rows=a):
            terms = sums.room((panel.width, n), like)
            transposed_times_into(terms, a_il, b.local)
            sums.start(terms, panel.row, c[panel.in_row])
        sums.finish()
        return Pending(c)

    def empty_ab_like(self, a: Tensor, b_columns: int) -> Tensor:
        return a.new_empty(()).expand(*a.shape[:-1], b_columns)

    def empty_abt_like(self, a: Tensor, b_rows: int) -> Tensor:
        width = b_rows * self.axes.row.size // self.axes.col.size
        return a.new_empty(()).expand(*a.shape[:-1], width)

    def prefetch(self, activation: Operand | None, weight: Operand | None) -> None:
        pass  # panels are sent when their turn comes


class Pipelined(Broadcast):
    """Panel l+1 travels, and the sum of panel l-1 returns, while panel l multiplies."""

    in_flight = 1
