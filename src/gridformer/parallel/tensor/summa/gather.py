"""The schedule that makes operands whole: few messages and large products.

The three products once more (see `products`), all panels at once. A weight is gathered down its
column; an activation is gathered along its row, and a sum of activations reduce-scattered, as the
section's boundary says (gridformer.parallel.tensor.boundary):

    product    along row i of devices        down column j of devices
    C = A B    gather A_i                    all-gather B_j              C_ij = A_i B_j
    C = A Bᵀ   reduce-scatter A_ij B_jᵀ      all-gather B_j
    C = Aᵀ B   gather A_i                    reduce-scatter A_iᵀ B_ij

What of an activation lies gathered at a time can be less than all of it: see `chunked`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gridformer import comm
from gridformer.comm import Pending
from gridformer.mesh import Axes
from gridformer.parallel.tensor.boundary import LABEL, Boundary
from gridformer.parallel.tensor.summa.chunks import ALL, ChunkedSum, WeightGradient
from gridformer.parallel.tensor.summa.operands import (
    Matrix,
    OneHot,
    OneHotOperand,
    Operand,
    columns,
    tensor_of,
    times,
    transposed_times,
)


class Gather:
    """All panels at once: one product, one sum.

    With activations cut over h this is a SUMMA schedule; with them cut over s or not at all it is
    Megatron, whose grid has one row.
    """

    def __init__(self, axes: Axes, boundary: Boundary) -> None:
        self.row, self.boundary = axes.row, boundary

    # ------------------------------------------------------------------ the products

    def ab(
        self, a: Operand, b: Operand, of: Callable[[Tensor], Tensor] = lambda whole: whole
    ) -> Pending:
        """C = A B. of: what is done to whole lines of A before they are multiplied (a norm)."""
        self.prefetch(a, b)
        weight = self.whole_column(b)
        if isinstance(a, OneHotOperand):
            return Pending(times(a.all, weight))
        return Pending(times(of(self._taken(a).wait()), weight))

    def abt(self, a: Operand, b: Operand) -> Pending:
        """C = A Bᵀ."""
        return self.boundary.reduce_scatter(times(a.local, self.whole_column(b).t()))

    def atb(self, a: Operand, b: Operand) -> Pending:
        """C = Aᵀ B."""
        whole = a.all if isinstance(a, OneHotOperand) else self._taken(a).wait()
        return self.sum_of_blocks(whole, b.local)

    def ab_and_atb(self, a: Operand, b: Operand, c: Tensor) -> tuple[Pending, Pending]:
        """A B and Aᵀ C for one gathering of A."""
        whole = self._taken(a).wait()
        atc = self.sum_of_blocks(whole, c)
        return Pending(times(whole, self.whole_column(b))), atc

    def sum_of_blocks(self, whole: Matrix, local: Matrix) -> Pending:
        """Aᵀ B of whole lines of A, summed down the column: this device keeps its block of rows.

        The others' blocks are multiplied first, and travel while this device's own is.
        """
        rows = whole.shape[-1] // self.row.size

        def block(index: int) -> Tensor:
            part = columns(whole, index * rows, (index + 1) * rows)
            return transposed_times(part, local)

        return comm.start_sum_of_parts(block, self.row, LABEL)

    def empty_ab_like(self, a: Tensor, b_columns: int) -> Tensor:
        return self.boundary.empty_gathered_like(a, b_columns)

    def empty_abt_like(self, a: Tensor, b_rows: int) -> Tensor:
        return self.boundary.empty_result_like(
            a, torch.Size((*a.shape[:-1], b_rows * self.row.size))
        )

    # ------------------------------------------------------------------ whole operands

    def prefetch(self, activation: Operand | None, weight: Operand | None) -> None:
        """Start to gather these; the products above and below wait for them."""
        if weight is not None and weight.whole is None:
            weight.whole = comm.start_all_gather(tensor_of(weight), self.row, 0, LABEL)
        if activation is not None:
            self._start(activation)

    def whole_row(self, a: Operand) -> Tensor:
        """All of an activation's row, which stays with the operand."""
        self._start(a)
        assert a.whole is not None
        return a.whole.wait()

    def whole_column(self, b: Operand) -> Tensor:
        """All of a weight's column, which stays with the operand."""
        Gather.prefetch(self, None, b)
        assert b.whole is not None
        return b.whole.wait()

    def _start(self, activation: Operand) -> None:
        if isinstance(activation.local, OneHot):
            return  # every device of a row knows the tokens
        if activation.whole is None:
            activation.whole = self.boundary.gather(tensor_of(activation))

    def _taken(self, a: Operand) -> Pending:
        """All of an activation's row, which is freed when its taker no longer holds it."""
        self._start(a)
        whole, a.whole = a.whole, None
        assert whole is not None
        return whole

    # ------------------------------------------------------------------ for loops over chunks

    def arriving(self, a: Operand) -> Iterator[tuple[slice, Pending]]:
        """The chunks of an activation, whole, in order: here there is one."""
        yield ALL, self._taken(a)

    def sum_of(self, shape: torch.Size, like: Tensor) -> ChunkedSum:
        """Of terms of an activation, whole and of that shape: what this device keeps of it."""
        return ChunkedSum(self.boundary, shape, like)

    def weight_gradient(self, a: Operand) -> WeightGradient:
        """Aᵀ B, for the chunks of A as they come."""
        return WeightGradient(self.sum_of_blocks, self.row, 1)
