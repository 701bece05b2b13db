"""The `Gather` schedule with activations that are gathered chunk by chunk.

Only a chunk of an activation is materialized at a time, and the next chunk travels while this one
is multiplied (as in MeshSlice, Nam et al. 2025). The volume is that of `Gather`, in more messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gridformer.comm import Pending
from gridformer.mesh import Axes
from gridformer.models.blocks.gradient_sum import MainGrad
from gridformer.parallel.tensor.boundary import Boundary
from gridformer.parallel.tensor.summa.chunks import (
    ALL,
    ChunkedResult,
    WeightGradient,
    even_chunks,
)
from gridformer.parallel.tensor.summa.gather import Gather
from gridformer.parallel.tensor.summa.operands import (
    Matrix,
    OneHot,
    OneHotOperand,
    Operand,
    tensor_of,
    times,
)


class ChunkedGather(Gather):
    """Gathers and reduce-scatters activations in chunks that overlap with the products.

    Args:
        axes: Axes of the grid.
        boundary: How activations are sharded between sections.
        n_chunks: Number of chunks of each activation; fewer if it has fewer indices to divide.

    Attributes:
        split: Function of (number of indices, maximum number of chunks) that returns the chunks.
    """

    def __init__(self, axes: Axes, boundary: Boundary, n_chunks: int) -> None:
        super().__init__(axes, boundary)
        self.n_chunks = n_chunks
        self.split: Callable[[int, int], list[slice]] = even_chunks

    def ab(self, a: Operand, b: Operand) -> Pending:
        if isinstance(a, OneHotOperand) or self._at_once(a):
            return super().ab(a, b)
        return self.ab_by_chunks(tensor_of(a), self.whole_column(b))

    def abt(self, a: Operand, b: Operand) -> Pending:
        weight = self.whole_column(b).t()
        if len(self.chunks(self._shape_of_abt(a.local, weight))) == 1:
            return super().abt(a, b)
        return self.abt_by_chunks(a.local, weight)

    def atb(self, a: Operand, b: Operand, into: MainGrad | None = None) -> Pending:
        if isinstance(a, OneHotOperand) or self._at_once(a):
            return super().atb(a, b, into)
        return self.atb_by_chunks(tensor_of(a), b.local, into)

    def ab_and_atb(
        self, a: Operand, b: Operand, c: Tensor, into: MainGrad | None = None
    ) -> tuple[Pending, Pending]:
        if self._at_once(a):
            return super().ab_and_atb(a, b, c, into)
        return self.ab_and_atb_by_chunks(tensor_of(a), b, c, into)

    # The loops over chunks. Each depends on nothing but the shapes of its operands, so traces and
    # estimates of memory run it once for each shape.

    def ab_by_chunks(self, a: Tensor, weight: Tensor) -> Pending:
        """Computes A B, given the gathered weight."""
        result = self._result(a, weight.shape[1])
        for chunk, arriving in self.arriving(Operand(a)):
            result.multiply(chunk, arriving.wait(), weight)
            del arriving
        return Pending(result.all())

    def abt_by_chunks(self, a: Matrix, weight: Tensor) -> Pending:
        """Computes A Bᵀ, given the transpose of the gathered weight."""
        shape = self._shape_of_abt(a, weight)
        sums = self.sum_of(shape, weight)
        for chunk in self.chunks(shape):
            sums.start(chunk, times(self._chunk_of(a, chunk), weight))
        return sums.pending()

    def atb_by_chunks(self, a: Tensor, b: Matrix, into: MainGrad | None) -> Pending:
        """Computes Aᵀ B."""
        operand = Operand(a)
        terms = self.weight_gradient(operand, into)
        for chunk, arriving in self.arriving(operand):
            terms.add(arriving.wait(), self._chunk_of(b, chunk))
            del arriving
        return terms.pending()

    def ab_and_atb_by_chunks(
        self, a: Tensor, b: Operand, c: Tensor, into: MainGrad | None
    ) -> tuple[Pending, Pending]:
        """Computes A B and Aᵀ C. The weight B may still be in flight."""
        operand = Operand(a)
        result, terms = self._result(a, tensor_of(b).shape[1]), self.weight_gradient(operand, into)
        for chunk, arriving in self.arriving(operand):
            whole = arriving.wait()
            del arriving
            terms.add(whole, self._chunk_of(c, chunk))
            result.multiply(chunk, whole, self.whole_column(b))
            del whole
        return Pending(result.all()), terms.pending()

    def prefetch(self, activation: Operand | None, weight: Operand | None) -> None:
        """Starts to gather the weight; activations are gathered chunk by chunk as they are used."""
        super().prefetch(activation if self.n_chunks == 1 else None, weight)

    def chunks(self, shape: torch.Size) -> list[slice]:
        """Returns the indices of each chunk for an activation of that shape."""
        if self.n_chunks == 1:
            return [ALL]
        return self.split(self.boundary.max_chunks(shape), self.n_chunks)

    def arriving(self, a: Operand) -> Iterator[tuple[slice, Pending]]:
        """Yields (indices, gathered chunk) of an activation in order, gathering one chunk ahead.

        The caller holds the only reference to a chunk, and drops it before asking for the next.
        """
        if self._at_once(a):
            yield from super().arriving(a)
            return
        local = tensor_of(a)
        chunks = self.chunks(local.shape)
        coming: list[Pending] = []
        for number, chunk in enumerate(chunks):
            coming.append(self.boundary.gather(self.boundary.chunk(local, chunk)))
            if number:
                yield chunks[number - 1], coming.pop(0)
        yield chunks[-1], coming.pop()

    def weight_gradient(self, a: Operand, into: MainGrad | None = None) -> WeightGradient:
        n_chunks = 1 if self._at_once(a) else len(self.chunks(a.local.shape))
        return WeightGradient(self.sum_of_blocks, self.row, n_chunks, into)

    def _at_once(self, a: Operand) -> bool:
        """Whether `a` is gathered already (kept for the backward pass) or consists of one chunk."""
        return a.whole is not None or len(self.chunks(a.local.shape)) == 1

    def _result(self, a: Tensor, width: int) -> ChunkedResult:
        return ChunkedResult(self.boundary, self.boundary.empty_gathered_like(a, width).shape)

    @staticmethod
    def _shape_of_abt(a: Matrix, weight: Tensor) -> torch.Size:
        return torch.Size((*a.shape[:-1], weight.shape[1]))

    def _chunk_of(self, x: Matrix, chunk: slice) -> Matrix:
        """Returns a chunk of an activation, whether sharded or gathered."""
        if isinstance(x, OneHot):
            tokens = self.boundary.chunk(x.tokens.unsqueeze(-1), chunk).squeeze(-1)
            return OneHot(tokens, x.first, x.size)
        return self.boundary.chunk(x, chunk)
