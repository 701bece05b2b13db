"""Products of whole operands, which all schemes have: few messages and large products.

A weight is all-gathered down its column of devices. The boundary of the section says how an
activation is gathered along its row, and how a sum of activations is reduce-scattered:

    product    along row i of devices        down column j of devices
    C = A B    gather A_i                    all-gather B_j              C_ij = A_i B_j
    C = A Bᵀ   reduce-scatter A_ij B_jᵀ      all-gather B_j
    C = Aᵀ B   gather A_i                    reduce-scatter A_iᵀ B_ij

`gridformer.parallel` lists the boundary of each scheme.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gridformer import comm
from gridformer.comm import Pending
from gridformer.mesh import Axes, Axis
from gridformer.models.blocks.cast import cast
from gridformer.models.blocks.gradient_sum import GradientSum
from gridformer.models.blocks.linear import as_rows
from gridformer.parallel.scheme import BoundarySpec

LABEL = "product"
ALL = slice(None)  # the chunk of an activation that is gathered at once

# --------------------------------------------------------------------------- boundaries


@dataclass(frozen=True)
class Replicated:
    """Every device of a row holds all of an activation, and sums are all-reduced."""

    col: Axis

    @property
    def chunk_dim(self) -> int | None:
        """The dimension of [b, s, h] that is cut into chunks; None for b and s together.

        It is not sharded, so any chunk can be gathered or reduce-scattered by itself.
        """
        return None

    def gather(self, x: Tensor) -> Pending:
        """Starts to gather the full activation from this device's part x of it."""
        return Pending(x)

    def reduce_scatter(self, partial: Tensor) -> Pending:
        """Starts to sum `partial` over devices, each of which keeps its part; may overwrite it."""
        return comm.start_all_reduce(partial, self.col, label=LABEL)

    def full(self, shape: torch.Size) -> list[int]:
        """Returns the shape of a gathered activation, given that of a part."""
        return list(shape)

    def part(self, shape: torch.Size) -> list[int]:
        """Returns the shape of a part of an activation, given that of the full one."""
        return list(shape)

    def max_chunks(self, shape: torch.Size) -> int:
        """Returns the most chunks of activations of that shape, full or sharded alike."""
        return shape[:-1].numel() if self.chunk_dim is None else shape[self.chunk_dim]

    def chunk(self, x: Tensor, indices: slice) -> Tensor:
        """Returns a view of a chunk of an activation, whether full or sharded."""
        if self.chunk_dim is None:
            return x.flatten(0, -2)[indices]
        return x[indices] if self.chunk_dim == 0 else x[:, indices]


@dataclass(frozen=True)
class Sharded(Replicated):
    """Activations are sharded along `dim`: 0 for b, 1 for s, -1 for h."""

    dim: int

    @property
    def chunk_dim(self) -> int | None:
        return {0: 1, 1: 0}.get(self.dim)

    def gather(self, x: Tensor) -> Pending:
        return comm.start_all_gather(x, self.col, self.dim, LABEL)

    def reduce_scatter(self, partial: Tensor) -> Pending:
        return comm.start_reduce_scatter(partial, self.col, self.dim, LABEL)

    def full(self, shape: torch.Size) -> list[int]:
        return [*shape[: self.dim], shape[self.dim] * self.col.size, *shape[self.dim :][1:]]

    def part(self, shape: torch.Size) -> list[int]:
        return [*shape[: self.dim], shape[self.dim] // self.col.size, *shape[self.dim :][1:]]


@dataclass(frozen=True)
class OnFirst(Replicated):
    """The first device holds the full activation; the others hold a tensor on the meta device.

    The meta tensor gives the shape and takes neither memory nor arithmetic.
    """

    device: torch.device

    def gather(self, x: Tensor) -> Pending:
        first = self.col.index == 0
        real = x.contiguous() if first else torch.empty(x.shape, dtype=x.dtype, device=self.device)
        return comm.start_broadcast(real, self.col, 0, LABEL)

    def reduce_scatter(self, partial: Tensor) -> Pending:
        total = comm.start_reduce(partial.contiguous(), self.col, 0, LABEL)
        return total if self.col.index == 0 else Pending(partial.to("meta"), total)


def boundary_of(spec: BoundarySpec, axes: Axes) -> Replicated:
    """Returns the boundary that a scheme's `BoundarySpec` describes."""
    axis = axes[spec.axis]
    if spec.activation_layout == "replicated":
        return Replicated(axis)
    if spec.activation_layout == "first":
        return OnFirst(axis, torch.device(axes.device_type))
    return Sharded(axis, {"b": 0, "s": 1, "h": -1}[spec.activation_layout])


# --------------------------------------------------------------------------- operands


@dataclass(frozen=True)
class OneHot:
    """Columns [first, first + size) of the one-hot matrix of token ids.

    The matrix [..., size] of `tokens` [...] is never materialized: products index rows instead.
    """

    tokens: Tensor
    first: int
    size: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.tokens.shape, self.size))

    def columns(self, start: int, stop: int) -> OneHot:
        """Returns columns [start, stop) of the full matrix, in the order of the vocabulary."""
        return OneHot(self.tokens, start, stop - start)

    def split(self, size: int, _: int) -> list[OneHot]:
        """Splits the full matrix into blocks of `size` columns, as `Tensor.split`."""
        return [self.columns(start, start + size) for start in range(0, self.size, size)]

    def rows_of(self, table: Tensor) -> Tensor:
        """Multiplies by a table [size, N]: [..., N], zeros for tokens outside these columns."""
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


class Operand:
    """A matrix sharded over the grid: this device's block, and its gathered form if it has one.

    An activation [.., K/c] is only gathered along its row of devices, and a weight [K/r, N/c] only
    down its column, so one field `whole` serves both.
    """

    __slots__ = ("local", "whole")

    def __init__(self, local: Any, whole: Pending | None = None) -> None:
        self.local: Any = local  # a Tensor, or a OneHot
        self.whole = whole

    @staticmethod
    def one_hot(tokens: Tensor, size: int, col: Axis) -> Operand:
        """Returns the one-hot matrix of tokens, of which all devices of a row hold everything."""
        full, part = OneHot(tokens, 0, size), size // col.size
        local = full.columns(col.index * part, (col.index + 1) * part)
        return Operand(local, Pending(full))  # type: ignore[arg-type]


def weight_operand(weight: Tensor, dtype: torch.dtype, padded: bool = False) -> Operand:
    """Returns a weight [K/r, N/c] in `dtype`, of which nothing is gathered yet."""
    # Only `cast` reads the values of placeholders, whose strides are 0.
    ready = weight.dtype == dtype and weight.stride(-1)
    return Operand(weight if ready else cast(weight, dtype, padded))


def add_bias(c: Tensor, bias: Tensor) -> None:
    """Adds a bias [N] to the first N columns of c [.., N or more] in place."""
    columns = c if c.shape[-1] == len(bias) else c[..., : len(bias)]
    ready = bias.dtype == c.dtype and bias.stride(-1)
    columns.add_(bias if ready else cast(bias, c.dtype))


def times(a: Any, b: Tensor) -> Tensor:
    """Multiplies a [.., K] by b [K, N]: [.., N]."""
    if isinstance(a, OneHot):
        return a.rows_of(b)
    return (a if a.is_contiguous() else as_rows(a)) @ b


def transposed_times(a: Any, b: Any) -> Tensor:
    """Multiplies the transpose of a [.., M] by b [.., N]: [M, N], summed over leading dims."""
    if isinstance(a, OneHot):
        return a.added_up(b)
    if isinstance(b, OneHot):
        return b.added_up(a).t()
    return a.flatten(0, -2).t() @ b.flatten(0, -2)


def _add_transposed_times(into: GradientSum, a: Any, b: Any) -> Tensor:
    """Adds the transpose of a [.., M] times b [.., N] to a gradient [M, N], and returns that."""
    if isinstance(a, OneHot) or isinstance(b, OneHot):
        into.add(transposed_times(a, b))
    else:
        into.add_product(a.flatten(0, -2).t(), b.flatten(0, -2))
    return into.value


# --------------------------------------------------------------------------- products


class Gathered:
    """The schedule that gathers whole operands, activations in chunks that travel meanwhile.

    Only one chunk of an activation is multiplied at a time, while the next one travels and the sum
    of the previous one does (as in MeshSlice, Nam et al. 2025). With one chunk, each product is one
    multiplication and one sum. With activations sharded over h this is a schedule of SUMMA; on a
    grid of one row it is Megatron.

    Args:
        axes: Axes of the grid.
        boundary: How activations are sharded between sections.
        n_chunks: Number of chunks of each activation; fewer if it has fewer indices to divide.

    Attributes:
        adds_gradients: Whether `atb` adds to a gradient where it multiplies.
        sums_elsewhere: Whether another device has the sums of `abt`.
    """

    def __init__(self, axes: Axes, boundary: Replicated, n_chunks: int = 1) -> None:
        self.row, self.boundary, self.n_chunks = axes.row, boundary, n_chunks
        self.adds_gradients = axes.row.size == 1
        self.sums_elsewhere = isinstance(boundary, OnFirst) and boundary.col.index > 0

    def start(self, activation: Operand | None, weight: Operand | None) -> None:
        """Starts to gather operands; several chunks are gathered one by one as they are used."""
        if weight is not None and weight.whole is None:
            weight.whole = (
                comm.start_all_gather(weight.local, self.row, 0, LABEL)
                if self.row.size > 1
                else Pending(weight.local)
            )
        if activation is not None and activation.whole is None and self.n_chunks == 1:
            activation.whole = self.boundary.gather(activation.local)

    def ab(self, a: Operand, b: Operand) -> Tensor:
        """Computes C = A B. a [.., K/c], b [K/r, N/c], result [.., N/c]."""
        if b.whole is None:
            self.start(a, b)
        column, c = b.whole.wait(), None  # type: ignore[union-attr]
        for chunk, arriving in self._arriving(a):
            if chunk == ALL:
                return times(arriving.wait(), column)
            c = self._store(c, a, chunk, arriving.wait(), column)
            del arriving
        assert c is not None
        return c

    def abt(self, a: Operand, b: Operand) -> Pending:
        """Computes C = A Bᵀ. a [.., K/c], b [N/r, K/c], result [.., N/c]."""
        if b.whole is None:
            self.start(None, b)
        column = b.whole.wait().t()  # type: ignore[union-attr]
        shape = torch.Size((*a.local.shape[:-1], column.shape[1]))
        if self.n_chunks == 1 or len(chunks := self.chunks(shape)) == 1:
            return self.boundary.reduce_scatter(times(a.local, column))
        total = _ChunkedSum(self.boundary, shape)
        for chunk in chunks:
            total.start(chunk, times(self._cut(a.local, chunk), column))
        return total

    def atb(self, a: Operand, b: Operand, into: GradientSum | None = None) -> Pending:
        """Computes C = Aᵀ B. a [.., M/c], b [.., N/c], result [M/r, N/c].

        The leading dimensions of `a` and `b` are equal and are summed over. On a grid of one row, C
        is added to the gradient `into`, and the sum is returned.
        """
        terms = None
        for chunk, arriving in self._arriving(a):
            if chunk == ALL:
                return self._sum_down(arriving.wait(), b.local, into)
            terms = self._accumulate(terms, arriving.wait(), self._cut(b.local, chunk), into)
            del arriving
        return self._sum_terms(terms, a.local.dtype, into)

    def ab_and_atb(
        self, a: Operand, b: Operand, c: Operand, into: GradientSum | None = None
    ) -> tuple[Tensor, Pending]:
        """Computes A B [.., N/c] and Aᵀ C [K/r, M/c] and gathers A only once.

        a [.., K/c], b [K/r, N/c], c [.., M/c]. The weight B may still be in flight.
        """
        ab = terms = atc = None
        for chunk, arriving in self._arriving(a):
            whole = arriving.wait()
            del arriving
            if chunk == ALL:
                atc = self._sum_down(whole, c.local, into)
            else:
                terms = self._accumulate(terms, whole, self._cut(c.local, chunk), into)
            ab = self._store(ab, a, chunk, whole, b.whole.wait())  # type: ignore[union-attr]
            del whole
        assert ab is not None
        return ab, atc or self._sum_terms(terms, a.local.dtype, into)

    def shape_of_ab(self, a: Tensor, n_columns: int) -> list[int]:
        """Returns the shape of A B for a local block [.., K/c] of A and [K/r, n_columns] of B."""
        return [*self.boundary.full(a.shape)[:-1], n_columns]

    def shape_of_abt(self, a: Tensor, n_rows: int) -> list[int]:
        """Returns the shape of A Bᵀ for a local block [.., K/c] of A and [n_rows, K/c] of B."""
        return self.boundary.part(torch.Size((*a.shape[:-1], n_rows * self.row.size)))

    # ------------------------------------------------------------------ chunks

    def chunks(self, shape: torch.Size) -> list[slice]:
        """Returns the indices of each chunk of an activation, of nearly equal sizes."""
        n_chunks = min(self.n_chunks, self.boundary.max_chunks(shape)) if self.n_chunks > 1 else 1
        if n_chunks <= 1:
            return [ALL]
        size, larger = divmod(self.boundary.max_chunks(shape), n_chunks)
        ends = [size * i + min(i, larger) for i in range(n_chunks + 1)]
        return [slice(*ends[i : i + 2]) for i in range(n_chunks)]

    def _arriving(self, a: Operand) -> Iterable[tuple[slice, Pending]]:
        """Returns (indices, gathered chunk) of an activation in order.

        The caller holds the only reference to a chunk, and drops it before asking for the next.
        """
        whole, a.whole = a.whole, None
        if whole is not None:  # kept for the backward pass, one-hot, or a single chunk
            return [(ALL, whole)]
        chunks = self.chunks(a.local.shape)
        if len(chunks) == 1:
            return [(ALL, self.boundary.gather(a.local))]
        return self._one_ahead(a.local, chunks)

    def _one_ahead(self, local: Tensor, chunks: list[slice]) -> Iterator[tuple[slice, Pending]]:
        coming: list[Pending] = []
        for number, chunk in enumerate(chunks):
            coming.append(self.boundary.gather(self.boundary.chunk(local, chunk)))
            if number:
                yield chunks[number - 1], coming.pop(0)
        yield chunks[-1], coming.pop()

    def _cut(self, x: Any, chunk: slice) -> Any:
        if isinstance(x, OneHot):
            tokens = self.boundary.chunk(x.tokens.unsqueeze(-1), chunk).squeeze(-1)
            return OneHot(tokens, x.first, x.size)
        return self.boundary.chunk(x, chunk)

    def _store(self, c: Tensor | None, a: Operand, chunk: slice, x: Any, column: Tensor) -> Tensor:
        """Stores x [.., K] times column [K, N] as a chunk of the result C, and returns C."""
        if chunk == ALL:
            return times(x, column)
        if c is None:
            c = x.new_empty(self.shape_of_ab(a.local, column.shape[1]))
        place = self.boundary.chunk(c, chunk)
        if place.is_contiguous():
            torch.matmul(x, column, out=place)
        else:
            place.copy_(times(x, column))
        return c

    # ------------------------------------------------------------------ gradients of weights

    def _sum_down(self, whole: Any, local: Any, into: GradientSum | None) -> Pending:
        """Computes Aᵀ B of a gathered A, summed down the column; this device keeps its rows.

        The blocks of other devices are multiplied first, and travel until its own is multiplied.
        """
        if self.row.size == 1:
            if into is not None:
                return Pending(_add_transposed_times(into, whole, local))
            return Pending(transposed_times(whole, local))
        blocks, others = whole.split(whole.shape[-1] // self.row.size, -1), []
        for index, block in enumerate(blocks):
            if index != self.row.index:
                others.append(transposed_times(block, local))
        total, own = comm.SumOfBlocks(others, self.row, LABEL), blocks[self.row.index]
        if total.in_flight:
            return _OwnLast(total, own, local)
        return total.add(transposed_times(own, local))

    def _accumulate(self, terms: Tensor | None, a: Any, b: Any, into: GradientSum | None) -> Tensor:
        """Adds Aᵀ B of a chunk in float32 at least, as a single product accumulates its terms."""
        if into is not None and self.row.size == 1:
            return _add_transposed_times(into, a, b)
        if terms is None:
            first = transposed_times(a, b)
            return first.to(torch.promote_types(first.dtype, torch.float32))
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == terms.dtype:
            return terms.addmm_(a.flatten(0, -2).t(), b.flatten(0, -2))
        terms += transposed_times(a, b)
        return terms

    def _sum_terms(self, terms: Any, dtype: torch.dtype, into: GradientSum | None) -> Pending:
        n, at = self.row.size, self.row.index
        if n == 1:
            return Pending(terms if into is not None else terms.to(dtype))
        blocks = [*terms.to(dtype).chunk(n)]
        own = blocks.pop(at).clone()  # of its own memory, so that of all terms is freed
        return comm.SumOfBlocks(blocks, self.row, LABEL).add(own)


class _OwnLast(Pending):
    """A sum of blocks Aᵀ B that are on their way; `wait` multiplies this device's block."""

    def __init__(self, total: comm.SumOfBlocks, a: Any, b: Any) -> None:
        self._total = total
        self._factors: tuple[Any, ...] = a, b

    def wait(self) -> Tensor:
        if self._factors:
            own, self._factors = transposed_times(*self._factors), ()
            self._result = self._total.add(own).wait()
        return self._result


class _ChunkedSum(Pending):
    """An activation that is reduce-scattered chunk by chunk; the last one may be on its way."""

    def __init__(self, boundary: Replicated, shape: torch.Size) -> None:
        self._boundary, self._shape = boundary, boundary.part(shape)
        self._total: Tensor | None = None
        self._coming: tuple[slice, Pending] | None = None

    def start(self, chunk: slice, terms: Tensor) -> None:
        """Waits for the previous chunk, then starts to reduce-scatter partial sums of this one."""
        self._store()
        self._coming = chunk, self._boundary.reduce_scatter(terms)

    def wait(self) -> Tensor:
        self._store()
        assert self._total is not None
        return self._total

    def _store(self) -> None:
        if self._coming is not None:
            (chunk, pending), self._coming = self._coming, None
            x = pending.wait()
            if self._total is None:
                self._total = x.new_empty(self._shape)
            self._boundary.chunk(self._total, chunk).copy_(x)
