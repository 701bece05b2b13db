"""Results that are computed chunk by chunk.

A chunk is a range of indices of one dimension of an activation [b, s, h]. Which dimension that is
depends on the boundary of the section (gridformer.parallel.tensor.boundary): any chunk can be
gathered, or reduce-scattered, independently of the others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gridformer import comm
from gridformer.comm import Pending
from gridformer.mesh import Axis
from gridformer.models.blocks.gradient_sum import MainGrad
from gridformer.parallel.tensor.boundary import LABEL, Boundary
from gridformer.parallel.tensor.summa.operands import (
    Matrix,
    add_transposed_times,
    times,
    transposed_times,
)

ALL = slice(None)


def even_chunks(n: int, n_chunks: int) -> list[slice]:
    """Splits n indices into at most `n_chunks` slices, the first ones one longer if needed."""
    n_chunks = min(n_chunks, n)
    size, larger = divmod(n, n_chunks)
    ends = [size * i + min(i, larger) for i in range(n_chunks + 1)]
    return [slice(*ends[i : i + 2]) for i in range(n_chunks)]


class ChunkedResult:
    """An activation of the given shape that is filled chunk by chunk."""

    def __init__(self, boundary: Boundary, shape: torch.Size) -> None:
        self._boundary, self._shape = boundary, shape
        self._made: Tensor | None = None

    def put(self, chunk: slice, x: Tensor) -> None:
        """Stores a chunk; `ALL` takes the tensor as the result without a copy."""
        if chunk == ALL:
            self._made = x
            return
        self._place(chunk, x).copy_(x)

    def multiply(self, chunk: slice, a: Tensor, b: Tensor) -> None:
        """Stores a [.., K] times b [K, N] as a chunk."""
        place = None if chunk == ALL else self._place(chunk, a)
        if place is not None and place.is_contiguous():
            torch.matmul(a, b, out=place)
        else:
            self.put(chunk, times(a, b))

    def all(self) -> Tensor:
        """Returns the result, once every chunk is stored."""
        assert self._made is not None
        return self._made

    def _place(self, chunk: slice, like: Tensor) -> Tensor:
        if self._made is None:
            self._made = like.new_empty(self._shape)
        return self._boundary.chunk(self._made, chunk)


class ChunkedSum:
    """Reduce-scatters partial sums of an activation over a row of devices, chunk by chunk.

    Args:
        boundary: Says how activations are sharded, and thus what each device keeps.
        shape: Shape of the full activation.
        like: Gives dtype and device.
    """

    def __init__(self, boundary: Boundary, shape: torch.Size, like: Tensor) -> None:
        self._boundary = boundary
        self._result = ChunkedResult(boundary, boundary.empty_result_like(like, shape).shape)
        self._coming: tuple[slice, Pending] | None = None

    def start(self, chunk: slice, terms: Tensor) -> None:
        """Waits for the previous chunk, then starts to reduce-scatter partial sums of this one."""
        self._finish_chunk()
        self._coming = chunk, self._boundary.reduce_scatter(terms)

    def pending(self) -> Pending:
        """Returns this device's part of the sum; the last chunk may still be in flight."""
        assert self._coming is not None
        chunk, last = self._coming
        if chunk == ALL:
            return last

        def complete(x: Tensor) -> Tensor:
            self._result.put(chunk, x)
            return self._result.all()

        return last.then(complete)

    def _finish_chunk(self) -> None:
        if self._coming is not None:
            chunk, pending = self._coming
            self._coming = None
            self._result.put(chunk, pending.wait())


class WeightGradient:
    """Aᵀ B summed down a column of devices, where A and B come chunk by chunk.

    Chunks are accumulated in float32 at least, as a single product accumulates its terms.

    Args:
        at_once: Starts the sum of Aᵀ B when there is a single chunk.
        row: The axis whose ranks each keep one block of rows of the sum.
        n_chunks: Number of calls to `add` that follow.
        into: The gradient to which the products are added, on a grid of one row.
    """

    def __init__(
        self,
        at_once: Callable[[Matrix, Matrix, MainGrad | None], Pending],
        row: Axis,
        n_chunks: int,
        into: MainGrad | None = None,
    ) -> None:
        self._at_once, self._row, self._n_chunks = at_once, row, n_chunks
        self._into = into
        self._pending: Pending | None = None
        self._terms: Tensor | None = None
        self._dtype: torch.dtype | None = None

    def add(self, a: Matrix, b: Matrix) -> None:
        """Adds one chunk: a [.., M] and b [.., N/c]."""
        if self._n_chunks == 1:
            self._pending = self._at_once(a, b, self._into)
            return
        if self._into is not None and self._row.size == 1:
            self._terms = add_transposed_times(self._into, a, b)
            self._dtype = self._terms.dtype
            return
        if self._terms is None:
            terms = transposed_times(a, b)
            self._dtype = terms.dtype
            self._terms = terms.to(torch.promote_types(terms.dtype, torch.float32))
        elif isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == self._terms.dtype:
            self._terms.addmm_(a.flatten(0, -2).t(), b.flatten(0, -2))
        else:
            self._terms += transposed_times(a, b)

    def pending(self) -> Pending:
        """Starts the sum over the column, once, and returns this device's block [M/r, N/c]."""
        if self._pending is None:
            assert self._terms is not None
            row, terms = self._row, self._terms.to(self._dtype)
            blocks = dict(enumerate(terms.chunk(row.size)))
            blocks[row.index] = blocks[row.index].clone() if row.size > 1 else terms
            self._terms = None
            del terms  # its memory is freed once the other blocks were copied for sending
            self._pending = comm.start_sum_of_parts(blocks.pop, row, LABEL)
        return self._pending
