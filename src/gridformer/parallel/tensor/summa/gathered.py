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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
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
Chunk = slice | tuple[slice, ...]  # what a chunk has of a part of an activation

# --------------------------------------------------------------------------- boundaries


@dataclass(frozen=True)
class Replicated:
    """Every device of a row holds all of an activation, and sums are all-reduced."""

    col: Axis

    @property
    def gathers(self) -> bool:
        """Whether an activation travels when a section is entered."""
        return False

    def gather(self, x: Tensor, out: Tensor | None = None) -> Pending:
        """Starts to gather the full activation from this device's part x of it.

        The result may be written to `out`, which is contiguous, or be another tensor.
        """
        return Pending(x)

    def reduce_scatter(self, partial: Tensor, out: Tensor | None = None) -> Pending:
        """Starts to sum `partial` over devices, each of which keeps its part; may overwrite it.

        The result may be written to `out` if that is contiguous, or be another tensor.
        """
        return comm.start_all_reduce(partial, self.col, label=LABEL)

    def sum_product(self, a: Any, b: Tensor, out: Tensor | None = None) -> Pending:
        """Starts to sum the product of a [.., K] and b [K, N] over devices: `reduce_scatter`."""
        if out is None:
            return self.reduce_scatter(times(a, b))
        terms = _chunk_times(a, b, None if self.gathers else out)  # is all-reduced where it is
        return self.reduce_scatter(terms, out if out.is_contiguous() else None)

    def full(self, shape: torch.Size) -> list[int]:
        """Returns the shape of a gathered activation, given that of a part."""
        return list(shape)

    def part(self, shape: torch.Size) -> list[int]:
        """Returns the shape of a part of an activation, given that of the full one."""
        return list(shape)

    def chunks(self, shape: torch.Size, n: int) -> Sequence[Chunk]:
        """Returns at most n chunks of a part of that shape, of nearly equal sizes."""
        return _ranges(shape[:-1].numel(), n)

    def of_part(self, x: Tensor, chunk: Chunk) -> Tensor:
        """Returns a view of a chunk of a part of an activation."""
        return x.flatten(0, -2)[chunk]

    def of_full(self, x: Tensor, chunk: Chunk) -> Tensor:
        """Returns a view of what a full activation has of a chunk of every device's part."""
        return x.flatten(0, -2)[chunk]


@dataclass(frozen=True)
class Sharded(Replicated):
    """Activations are sharded along `dim`: 0 for b, 1 for s, -1 for h.

    Chunks over s are some sequences, or tokens of one: those of all devices together then lie apart
    in the full activation. Chunks over b are tokens of all sequences.

    Over NCCL no full activation is copied that is sharded along h: a part is transposed before it
    is gathered, and a sum is multiplied block by block.
    """

    dim: int

    @property
    def gathers(self) -> bool:
        return True

    @cached_property
    def turned(self) -> bool:
        """Whether a gathered activation lies in memory as its transpose [h, tokens]."""
        return self.dim == -1 and self.col.size > 1 and self.col.over_nccl

    def gather(self, x: Tensor, out: Tensor | None = None) -> Pending:
        if self.turned:
            part = x.flatten(0, -2).t().contiguous()
            whole = x.new_empty(self.col.size * len(part), part.shape[1])
            arriving = comm.start_all_gather(part, self.col, 0, LABEL, out=whole)
            return Pending(whole.t().view(self.full(x.shape)), arriving)
        if out is not None:
            out = out.view(self.full(x.shape))
        return comm.start_all_gather(x, self.col, self.dim, LABEL, out=out)

    def reduce_scatter(self, partial: Tensor, out: Tensor | None = None) -> Pending:
        if out is not None:
            partial = partial.view(self.full(out.shape))
        return comm.start_reduce_scatter(partial, self.col, self.dim, LABEL, out=out)

    def sum_product(self, a: Any, b: Tensor, out: Tensor | None = None) -> Pending:
        if not self.turned or isinstance(a, OneHot):
            if out is None:
                return self.reduce_scatter(times(a, b))
            return super().sum_product(a, b, out)
        n, rows = self.col.size, a.flatten(0, -2)
        blocks = torch.bmm(rows.expand(n, -1, -1), b.unflatten(1, (n, -1)).movedim(1, 0))
        if out is None:
            out = rows.new_empty(*a.shape[:-1], blocks.shape[2])
        return comm.start_reduce_scatter(blocks.flatten(0, 1), self.col, 0, LABEL, out=out)

    def chunks(self, shape: torch.Size, n: int) -> Sequence[Chunk]:
        if self.dim == 0:
            return [(ALL, tokens) for tokens in _ranges(shape[1], n)]
        if self.dim == 1 and n > shape[0]:
            tokens = [_ranges(shape[1], len(range(i, n, shape[0]))) for i in range(shape[0])]
            return [(slice(i, i + 1), one) for i, each in enumerate(tokens) for one in each]
        return _ranges(shape[0], n) if self.dim == 1 else super().chunks(shape, n)

    def of_part(self, x: Tensor, chunk: Chunk) -> Tensor:
        return super().of_part(x, chunk) if self.dim == -1 else x[chunk]

    def of_full(self, x: Tensor, chunk: Chunk) -> Tensor:
        if self.dim == 1 and isinstance(chunk, tuple):
            sequence, tokens = chunk
            return x[sequence].unflatten(1, (self.col.size, -1))[0, :, tokens]
        return self.of_part(x, chunk)

    def full(self, shape: torch.Size) -> list[int]:
        return [*shape[: self.dim], shape[self.dim] * self.col.size, *shape[self.dim :][1:]]

    def part(self, shape: torch.Size) -> list[int]:
        return [*shape[: self.dim], shape[self.dim] // self.col.size, *shape[self.dim :][1:]]


@dataclass(frozen=True)
class InRankOrder(Sharded):
    """Activations are sharded over s and gathered device by device: [b, s/c, h] to [c b, s/c, h].

    It serves sections that treat all tokens alike. Their messages are contiguous, while those over
    s are copied if there are several sequences. Chunks are those over s.
    """

    dim: int = 0

    def chunks(self, shape: torch.Size, n: int) -> Sequence[Chunk]:
        over_s = Sharded(self.col, 1).chunks(shape, n)
        return [(chunk, ALL) if isinstance(chunk, slice) else chunk for chunk in over_s]

    def of_full(self, x: Tensor, chunk: Chunk) -> Tensor:
        assert isinstance(chunk, tuple)
        return x.unflatten(0, (self.col.size, -1))[(ALL, *chunk)].flatten(1, 2)


@dataclass(frozen=True)
class OnFirst(Replicated):
    """The first device holds the full activation; the others hold a tensor on the meta device.

    The meta tensor gives the shape and takes neither memory nor arithmetic.
    """

    device: torch.device

    @property
    def gathers(self) -> bool:
        return True

    def gather(self, x: Tensor, out: Tensor | None = None) -> Pending:
        first = self.col.index == 0
        real = x.contiguous() if first else torch.empty(x.shape, dtype=x.dtype, device=self.device)
        return comm.start_broadcast(real, self.col, 0, LABEL)

    def reduce_scatter(self, partial: Tensor, out: Tensor | None = None) -> Pending:
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


def _ranges(size: int, n: int) -> list[slice]:
    """Returns at most n ranges of nearly equal lengths that cover `size` indices."""
    n = max(1, min(n, size))
    each, longer = divmod(size, n)
    ends = [each * i + min(i, longer) for i in range(n + 1)]
    return [slice(*ends[i : i + 2]) for i in range(n)]


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
        grad = grad.flatten(0, -2) * here.reshape(-1, 1).to(grad.dtype)
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


def times(a: Any, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiplies a [.., K] by b [K, N]: [.., N], and adds a bias [N] in the same kernel."""
    if isinstance(a, OneHot):
        return a.rows_of(b)
    a = a if a.is_contiguous() else as_rows(a)
    if bias is None:
        return a @ b
    ready = bias.dtype == a.dtype and bias.stride(-1)
    bias = bias if ready else cast(bias, a.dtype)
    return torch.addmm(bias, a.flatten(0, -2), b).view(*a.shape[:-1], -1)


def _chunk_times(a: Any, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiplies a chunk [.., K] by b [K, N]: [.., N], in `out` if that is given.

    Rows of tokens [c, k, K], or [c, k, N] in `out`, that lie apart are multiplied by one kernel
    where they are, without a copy.
    """
    if isinstance(a, OneHot):
        return a.rows_of(b)
    if a.dim() < 3 or (a.is_contiguous() and (out is None or out.is_contiguous())):
        rows = None if out is None else out.flatten(0, -2)
        c = torch.mm(a.flatten(0, -2), b, out=rows)
        return c.view(*a.shape[:-1], -1) if out is None else out
    apart = a.view(*(a if out is None else out).shape[:-1], -1)
    return torch.bmm(apart, b.expand(len(apart), -1, -1), out=out)


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
        whole_backward: Whether chunks only hide messages, and need not save memory: the gradient of
            a weight is then one product of whole activations. Not with `OnFirst`.

    Attributes:
        adds_gradients: Whether `atb` adds to a gradient where it multiplies.
        sums_bias: Whether `abt` adds a bias [N], which all devices of a row have.
        sums_elsewhere: Whether another device has the sums of `abt`.
    """

    def __init__(
        self, axes: Axes, boundary: Replicated, n_chunks: int = 1, whole_backward: bool = False
    ) -> None:
        self.row, self.boundary, self.n_chunks = axes.row, boundary, n_chunks
        self._at_once = Gathered(axes, boundary) if whole_backward else None
        self.adds_gradients = axes.row.size == 1
        over_h = isinstance(boundary, Sharded) and boundary.dim == -1
        self.sums_bias = boundary.col.size == 1 or (n_chunks == 1 and not over_h)
        self.sums_elsewhere = isinstance(boundary, OnFirst) and boundary.col.index > 0

    @property
    def in_backward(self) -> Gathered:
        """The schedule of the gradients of A B.

        Messages of whole activations travel behind the one of both products that does not wait for
        them, so chunks hide no more.
        """
        return self._at_once or self

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

    def ab(self, a: Operand, b: Operand, bias: Tensor | None = None) -> Tensor:
        """Computes C = A B + bias. a [.., K/c], b [K/r, N/c], bias [at most N/c], C [.., N/c]."""
        if b.whole is None:
            self.start(a, b)
        column, c = b.whole.wait(), None  # type: ignore[union-attr]
        for chunk, arriving in self._arriving(a):
            if chunk == ALL and (bias is None or len(bias) == column.shape[1]):
                return times(arriving.wait(), column, bias)
            c = self._store(c, a, chunk, arriving.wait(), column)
            del arriving
        assert c is not None
        if bias is not None:
            add_bias(c, bias)
        return c

    def abt(self, a: Operand, b: Operand, bias: Tensor | None = None) -> Pending:
        """Computes C = A Bᵀ + bias. a [.., K/c], b [N/r, K/c], result [.., N/c]; see `sums_bias`.

        The first device of the row adds the bias, in the kernel that multiplies its term.
        """
        if b.whole is None:
            self.start(None, b)
        column = b.whole.wait().t()  # type: ignore[union-attr]
        if bias is not None:
            term = times(a.local, column, bias if self.boundary.col.index == 0 else None)
            return self.boundary.reduce_scatter(term)
        if self.n_chunks == 1:
            return self.boundary.sum_product(a.local, column)
        part = self.boundary.part(torch.Size((*a.local.shape[:-1], column.shape[1])))
        if len(chunks := self.chunks(torch.Size(part))) == 1:
            return self.boundary.sum_product(a.local, column)
        device = torch.device("meta") if self.sums_elsewhere else column.device
        total = _ChunkedSum(self.boundary, column.new_empty(part, device=device))
        for chunk in chunks:
            total.start(chunk, self._cut(a.local, chunk), column)
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
        turned = isinstance(self.boundary, Sharded) and self.boundary.turned
        if self._at_once is not None and a.whole is None and self.boundary.gathers and not turned:
            chunks = self.chunks(a.local.shape)
            if len(chunks) > 1:
                return self._ab_and_whole_atb(a, b, c, chunks, into)
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

    def _ab_and_whole_atb(
        self, a: Operand, b: Operand, c: Operand, chunks: Sequence[Chunk], into: GradientSum | None
    ) -> tuple[Tensor, Pending]:
        """`ab_and_atb`: chunks of A are multiplied by B as they arrive, then Aᵀ C is one product.

        Tokens of both factors of that lie in the order in which they arrive.
        """
        full = torch.Size(self.boundary.full(a.local.shape))
        whole, ab = a.local.new_empty((full[:-1].numel(), full[-1])), None
        mine = [self._cut(c.local, chunk) for chunk in chunks]
        sizes = [one.shape[:-1].numel() for one in mine]
        in_order = isinstance(chunks[0], slice)
        other = (
            c.local.flatten(0, -2)
            if in_order
            else c.local.new_empty(*whole.shape[:1], c.local.shape[-1])
        )
        column = b.whole.wait()  # type: ignore[union-attr]
        arriving = self._one_ahead(a.local, chunks, whole.split(sizes))
        for one, place, (chunk, coming) in zip(mine, other.split(sizes), arriving):
            if not in_order:
                place.view(one.shape).copy_(one)
            ab = self._store(ab, a, chunk, coming.wait(), column)
        assert ab is not None
        return ab, self._sum_down(whole, other, into)

    def shape_of_ab(self, a: Tensor, n_columns: int) -> list[int]:
        """Returns the shape of A B for a local block [.., K/c] of A and [K/r, n_columns] of B."""
        return [*self.boundary.full(a.shape)[:-1], n_columns]

    def shape_of_abt(self, a: Tensor, n_rows: int) -> list[int]:
        """Returns the shape of A Bᵀ for a local block [.., K/c] of A and [n_rows, K/c] of B."""
        return self.boundary.part(torch.Size((*a.shape[:-1], n_rows * self.row.size)))

    # ------------------------------------------------------------------ chunks

    def chunks(self, shape: torch.Size) -> Sequence[Chunk]:
        """Returns the chunks of a part of an activation."""
        if self.n_chunks == 1 or len(chunks := self.boundary.chunks(shape, self.n_chunks)) == 1:
            return [ALL]
        return chunks

    def _arriving(self, a: Operand) -> Iterable[tuple[Chunk, Pending]]:
        """Returns (chunk, its gathered form) of an activation in order.

        The caller holds the only reference to a chunk, and drops it before asking for the next.
        """
        whole, a.whole = a.whole, None
        if whole is not None:  # kept for the backward pass, one-hot, or a single chunk
            return [(ALL, whole)]
        chunks = self.chunks(a.local.shape) if self.boundary.gathers else [ALL]
        if len(chunks) == 1:
            return [(ALL, self.boundary.gather(a.local))]
        return self._one_ahead(a.local, chunks, [None] * len(chunks))

    def _one_ahead(
        self, local: Tensor, chunks: Sequence[Chunk], places: Sequence[Tensor | None]
    ) -> Iterator[tuple[Chunk, Pending]]:
        """Yields chunks that are gathered, if they can be in `places`, one ahead of the caller."""
        coming: list[Pending] = []
        for number, (chunk, place) in enumerate(zip(chunks, places)):
            coming.append(self.boundary.gather(self.boundary.of_part(local, chunk), place))
            if number:
                yield chunks[number - 1], coming.pop(0)
        yield chunks[-1], coming.pop()

    def _cut(self, x: Any, chunk: Chunk) -> Any:
        if isinstance(x, OneHot):
            tokens = self.boundary.of_full(x.tokens.unsqueeze(-1), chunk).squeeze(-1)
            return OneHot(tokens, x.first, x.size)
        return self.boundary.of_full(x, chunk)

    def _store(self, c: Tensor | None, a: Operand, chunk: Chunk, x: Any, column: Tensor) -> Tensor:
        """Stores x [.., K] times column [K, N] as a chunk of the result C, and returns C."""
        if chunk == ALL:
            return times(x, column)
        if c is None:
            c = x.new_empty(self.shape_of_ab(a.local, column.shape[1]))
        _chunk_times(x, column, self.boundary.of_full(c, chunk))
        return c

    # ------------------------------------------------------------------ gradients of weights

    def _sum_down(self, whole: Any, local: Any, into: GradientSum | None) -> Pending:
        """Computes Aᵀ B of a gathered A, summed down the column; this device keeps its rows.

        NCCL needs all rows at once, so that they are one product. Over gloo the blocks of other
        devices are multiplied first, and travel while its own is multiplied.
        """
        if self.row.size == 1:
            if into is not None:
                return Pending(_add_transposed_times(into, whole, local))
            return Pending(transposed_times(whole, local))
        if self.row.over_nccl:
            return comm.start_reduce_scatter(transposed_times(whole, local), self.row, 0, LABEL)
        blocks = [*whole.split(whole.shape[-1] // self.row.size, -1)]
        own = blocks.pop(self.row.index)
        others = [transposed_times(block, local) for block in blocks]
        return comm.SumOfBlocks(others, self.row, LABEL).add(transposed_times(own, local))

    def _accumulate(
        self, terms: GradientSum | None, a: Tensor, b: Any, into: GradientSum | None
    ) -> GradientSum:
        """Adds Aᵀ B of a chunk in float32 at least, as a single product accumulates its terms."""
        if terms is None:
            terms = into if self.row.size == 1 else None
            terms = terms or GradientSum((), a.dtype)
        _add_transposed_times(terms, a, b)
        return terms

    def _sum_terms(
        self, terms: GradientSum | None, dtype: torch.dtype, into: GradientSum | None
    ) -> Pending:
        assert terms is not None
        if terms is into:
            return Pending(terms.value)
        total = terms.value.to(dtype)
        if self.row.size == 1:
            return Pending(total)
        if self.row.over_nccl:
            return comm.start_reduce_scatter(total, self.row, 0, LABEL)
        blocks = [*total.chunk(self.row.size)]
        own = blocks.pop(self.row.index).clone()  # of its own memory, so that all terms are freed
        return comm.SumOfBlocks(blocks, self.row, LABEL).add(own)


class _ChunkedSum(Pending):
    """An activation that is reduce-scattered chunk by chunk; the last one may be on its way."""

    def __init__(self, boundary: Replicated, total: Tensor) -> None:
        self._boundary, self._total = boundary, total
        self._coming: tuple[Tensor, Pending] | None = None

    def start(self, chunk: Chunk, a: Any, column: Tensor) -> None:
        """Multiplies a chunk, starts to reduce-scatter it, and stores the one before."""
        place = self._boundary.of_part(self._total, chunk)
        coming = self._boundary.sum_product(a, column, place)
        self._store()
        self._coming = place, coming

    def wait(self) -> Tensor:
        self._store()
        return self._total

    def _store(self) -> None:
        if self._coming is not None:
            (place, pending), self._coming = self._coming, None
            if (x := pending.wait()) is not place:
                place.copy_(x)
