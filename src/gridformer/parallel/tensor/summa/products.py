"""The three matrix products of SUMMA, panel by panel: C = A B, C = A Bᵀ and C = Aᵀ B.

These are Algorithms 1 to 3 of Optimus (Xu, Li, Gong, You 2021, "An Efficient 2D Method for Training
Super-Large Deep Learning Models"), after van de Geijn and Watts 1997. A matrix [M, K] is sharded
over the whole grid, M over its rows and K over its columns: device (i, j) holds the block
[M/r, K/c]. A loop runs over the panels l of the dimension that is sharded over columns in one
matrix and over rows in another:

    Algorithm  product    along row i of devices     down column j of devices
    1          C = A B    broadcast A_il             broadcast B_lj             C_ij += A_il B_lj
    2          C = A Bᵀ   reduce A_ij B_ljᵀ to C_il  broadcast B_lj
    3          C = Aᵀ B   broadcast A_il             reduce A_ilᵀ B_ij to C_lj

The grid of the paper is square, and panel l is block l of both matrices. Here a grid has any r rows
and c columns: a panel is a range that lies within one block of each matrix (`panels`), so exactly
one row (`panel.row`) and one column (`panel.col`) of devices own it. Activations may have several
leading dimensions, which together count as M.

`PanelTransport` moves the panels and decides how many are in flight. `autograd` has the gradients,
each of which is one of the same three products.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from gridformer.comm import Pending
from gridformer.mesh import Axes
from gridformer.models.blocks.gradient_sum import MainGrad
from gridformer.parallel.tensor.summa.operands import (
    Operand,
    accumulator,
    add_times,
    tensor_of,
    times,
    times_into,
    transposed_times_into,
)
from gridformer.parallel.tensor.summa.transport import PanelTransport


class Schedule(Protocol):
    """How the products of a grid communicate.

    A product returns a `Pending`: its last communication may still be in flight, and `wait()`
    returns the result.

    Attributes:
        adds_gradients: Whether `atb` adds to a gradient where it multiplies.
    """

    adds_gradients: bool

    def ab(self, a: Operand, b: Operand) -> Pending:
        """Computes C = A B: a [.., K/c], b [K/r, N/c], result [.., N/c]."""

    def abt(self, a: Operand, b: Operand) -> Pending:
        """Computes C = A Bᵀ: a [.., K/c], b [N/r, K/c], result [.., N/c]."""

    def atb(self, a: Operand, b: Operand, into: MainGrad | None = None) -> Pending:
        """Computes C = Aᵀ B: a [.., M/c], b [.., N/c], result [M/r, N/c].

        The leading dimensions of `a` and `b` are equal and are summed over.

        Args:
            a: The block of A.
            b: The block of B.
            into: A gradient to which a schedule may add C, whose sum it then returns.
        """

    def empty_ab_like(self, a: Tensor, b_columns: int) -> Tensor:
        """Returns a tensor with the shape and dtype of A B that holds at most one element.

        Args:
            a: Local block [.., K/c].
            b_columns: Columns N/c of the local block of B.
        """

    def empty_abt_like(self, a: Tensor, b_rows: int) -> Tensor:
        """Like `empty_ab_like`, for A Bᵀ with `b_rows` = N/r rows in the local block of B."""

    def prefetch(self, activation: Operand | None, weight: Operand | None) -> None:
        """Hints that these operands will be needed soon; a schedule may start to gather them."""


class Broadcast:
    """The schedule of the paper: broadcast a panel, multiply it, then reduce its sum.

    `in_flight` is the number of panels that travel while another one is multiplied: 0 here, and 1
    in `Pipelined`.
    """

    in_flight = 0
    adds_gradients = False

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self.transport = PanelTransport(axes, self.in_flight)

    def ab(self, a: Operand, b: Operand) -> Pending:
        """Optimus, Algorithm 1: for each panel l, C_ij += A_il B_lj."""
        k = tensor_of(b).shape[0] * self.axes.row.size
        c: Tensor | None = None
        for _, a_il, b_lj in self.transport.broadcast(k, along_rows=a, down_columns=b):
            # Panels of bfloat16 and float16 are accumulated in float32.
            c = times(a_il, b_lj) if c is None else add_times(accumulator(c), a_il, b_lj)
        assert c is not None
        return Pending(c.to(tensor_of(b).dtype))

    def abt(self, a: Operand, b: Operand) -> Pending:
        """Optimus, Algorithm 2: for each panel l, reduce A_ij B_ljᵀ over j to C_il on its owner."""
        b_ij = tensor_of(b)
        n = b_ij.shape[0] * self.axes.row.size
        c = b_ij.new_empty((*a.local.shape[:-1], n // self.axes.col.size))
        sums = self.transport.reduce(self.axes.col)
        for panel, _, b_lj in self.transport.broadcast(n, down_columns=b):
            terms = sums.buffer((*c.shape[:-1], panel.width), b_ij)
            times_into(terms, a.local, b_lj.t())
            sums.start(terms, panel.col, c[..., panel.in_col])
        sums.finish()
        return Pending(c)

    def atb(self, a: Operand, b: Operand, into: MainGrad | None = None) -> Pending:
        """Optimus, Algorithm 3: for each panel l, reduce A_ilᵀ B_ij over i to C_lj on its owner."""
        like = a.local if isinstance(a.local, Tensor) else tensor_of(b)
        m, n = a.local.shape[-1] * self.axes.col.size, b.local.shape[-1]
        c = like.new_empty((m // self.axes.row.size, n))
        sums = self.transport.reduce(self.axes.row)
        for panel, a_il, _ in self.transport.broadcast(m, along_rows=a):
            terms = sums.buffer((panel.width, n), like)
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
        pass  # each panel is broadcast only when the loop reaches it


class Pipelined(Broadcast):
    """Broadcasts panel l+1 and reduces the sum of panel l-1 while panel l multiplies."""

    in_flight = 1
