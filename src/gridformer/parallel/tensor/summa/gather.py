"""The schedule that gathers whole operands: few messages and large products.

It computes the three products of `products` with all panels at once. A weight is all-gathered down
its column of devices. The boundary of the section (gridformer.parallel.tensor.boundary) says how an
activation is gathered along its row, and how a sum of activations is reduce-scattered:

    product    along row i of devices        down column j of devices
    C = A B    gather A_i                    all-gather B_j              C_ij = A_i B_j
    C = A Bᵀ   reduce-scatter A_ij B_jᵀ      all-gather B_j
    C = Aᵀ B   gather A_i                    reduce-scatter A_iᵀ B_ij

`chunked` gathers an activation in chunks instead, so that it is never materialized as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gridformer import comm
from gridformer.comm import Pending
from gridformer.mesh import Axes
from gridformer.models.blocks.gradient_sum import MainGrad
from gridformer.parallel.tensor.boundary import LABEL, Boundary
from gridformer.parallel.tensor.summa.chunks import ALL, ChunkedSum, WeightGradient
from gridformer.parallel.tensor.summa.operands import (
    Matrix,
    OneHot,
    OneHotOperand,
    Operand,
    add_transposed_times,
    columns,
    tensor_of,
    times,
    transposed_times,
)


class Gather:
    """Gathers all panels at once, so that each product is one multiplication and one sum.

    With activations sharded over h this is a schedule of SUMMA. With activations sharded over s, or
    replicated, on a grid of one row it is Megatron.
    """

    def __init__(self, axes: Axes, boundary: Boundary) -> None:
        self.row, self.boundary = axes.row, boundary
        self.adds_gradients = axes.row.size == 1

    # ------------------------------------------------------------------ the products

    def ab(self, a: Operand, b: Operand) -> Pending:
        """Computes C = A B. a [.., K/c], b [K/r, N/c], result [.., N/c]."""
        self.prefetch(a, b)
        weight = self.whole_column(b)
        if isinstance(a, OneHotOperand):
            return Pending(times(a.all, weight))
        return Pending(times(self._take_whole(a).wait(), weight))

    def abt(self, a: Operand, b: Operand) -> Pending:
        """Computes C = A Bᵀ. a [.., K/c], b [N/r, K/c], result [.., N/c]."""
        return self.boundary.reduce_scatter(times(a.local, self.whole_column(b).t()))

    def atb(self, a: Operand, b: Operand, into: MainGrad | None = None) -> Pending:
        """Computes C = Aᵀ B. a [.., M/c], b [.., N/c], result [M/r, N/c]."""
        whole = a.all if isinstance(a, OneHotOperand) else self._take_whole(a).wait()
        return self.sum_of_blocks(whole, b.local, into)

    def ab_and_atb(
        self, a: Operand, b: Operand, c: Tensor, into: MainGrad | None = None
    ) -> tuple[Pending, Pending]:
        """Computes A B [.., N/c] and Aᵀ C [K/r, M/c] and gathers A only once.

        a [.., K/c], b [K/r, N/c], c [.., M/c].
        """
        whole = self._take_whole(a).wait()
        atc = self.sum_of_blocks(whole, c, into)
        return Pending(times(whole, self.whole_column(b))), atc

    def sum_of_blocks(self, whole: Matrix, local: Matrix, into: MainGrad | None = None) -> Pending:
        """Computes Aᵀ B summed down the column; this device keeps its block of rows.

        The blocks of other devices are multiplied first, and travel while this device's block is
        multiplied.

        Args:
            whole: A gathered chunk [.., M] of A.
            local: This device's columns [.., N/c] of B.
            into: The gradient to which the product is added, on a grid of one row.

        Returns:
            The block [M/r, N/c] of the sum.
        """
        if into is not None and self.adds_gradients:
            return Pending(add_transposed_times(into, whole, local))
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

    # ------------------------------------------------------------------ gathered operands

    def prefetch(self, activation: Operand | None, weight: Operand | None) -> None:
        """Starts to gather these operands; the products wait for them."""
        if weight is not None and weight.whole is None:
            weight.whole = comm.start_all_gather(tensor_of(weight), self.row, 0, LABEL)
        if activation is not None:
            self._start(activation)

    def whole_row(self, a: Operand) -> Tensor:
        """Returns the activation gathered along its row; the operand keeps a reference to it."""
        self._start(a)
        assert a.whole is not None
        return a.whole.wait()

    def whole_column(self, b: Operand) -> Tensor:
        """Returns the weight [K, N/c] gathered down its column; the operand keeps a reference."""
        Gather.prefetch(self, None, b)
        assert b.whole is not None
        return b.whole.wait()

    def _start(self, activation: Operand) -> None:
        if isinstance(activation.local, OneHot):
            return  # every device of a row holds the tokens
        if activation.whole is None:
            activation.whole = self.boundary.gather(tensor_of(activation))

    def _take_whole(self, a: Operand) -> Pending:
        """Gathers an activation; the caller holds the only reference, so it can free the memory."""
        self._start(a)
        whole, a.whole = a.whole, None
        assert whole is not None
        return whole

    # ------------------------------------------------------------------ loops over chunks

    def arriving(self, a: Operand) -> Iterator[tuple[slice, Pending]]:
        """Yields (indices, gathered chunk) of an activation in order; here there is one chunk."""
        yield ALL, self._take_whole(a)

    def sum_of(self, shape: torch.Size, like: Tensor) -> ChunkedSum:
        """Returns the reduce-scatter, chunk by chunk, of partial sums of a full activation.

        Args:
            shape: Shape of the full activation.
            like: Gives dtype and device.
        """
        return ChunkedSum(self.boundary, shape, like)

    def weight_gradient(self, a: Operand, into: MainGrad | None = None) -> WeightGradient:
        """Returns the accumulator of Aᵀ B for the chunks of A that `arriving` yields."""
        return WeightGradient(self.sum_of_blocks, self.row, 1, into)
