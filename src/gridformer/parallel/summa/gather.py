"""The schedule that makes operands whole: few messages and large products.

A weight is gathered down its column at once. An activation is gathered along its row, and a sum of
activations cut, at once or in `parts`, stretch after stretch of its lines: then what lies gathered
is a stretch and not all of it, and the next one travels while this one multiplies. What travels is
the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gridformer import comm
from gridformer.comm import Axes, Pending
from gridformer.parallel.ends import LABEL, End
from gridformer.parallel.summa.operands import (
    Matrix,
    OneHot,
    OneHotOperand,
    Operand,
    columns,
    tensor_of,
    times,
    transposed_times,
)

ALL = slice(None)


def even_chunks(n: int, n_chunks: int) -> list[slice]:
    """n lines in at most so many chunks; where n does not divide, the first ones are larger."""
    n_chunks = min(n_chunks, n)
    size, larger = divmod(n, n_chunks)
    ends = [size * i + min(i, larger) for i in range(n_chunks + 1)]
    return [slice(*ends[i : i + 2]) for i in range(n_chunks)]


class Gather:
    """All operands at once, one product, one sum; of activations as many times as there are parts.

    An activation becomes whole and a sum of activations is cut as `end` says, weights are gathered
    down the columns. With activations cut over h this is a SUMMA schedule; with them cut over s or
    not at all it is Megatron, whose grid has one row.
    """

    def __init__(self, axes: Axes, end: End, parts: int = 1) -> None:
        self.row, self.end, self.parts = axes.row, end, parts
        self.split: Callable[[int, int], list[slice]] = even_chunks

    def ahead(self, activation: Operand | None, weight: Operand | None) -> None:
        if weight is not None and weight.whole is None:
            weight.whole = comm.start_all_gather(tensor_of(weight), self.row, 0, LABEL)
        if activation is not None and self.parts == 1:
            self._start(activation)

    def ab(
        self, a: Operand, b: Operand, of: Callable[[Tensor], Tensor] = lambda whole: whole
    ) -> Pending:
        """See Schedule. of: what is done to whole lines of A before they are multiplied."""
        self.ahead(a, b)
        weight = self.whole_column(b)
        if isinstance(a, OneHotOperand):
            return Pending(times(a.all, weight))
        local = tensor_of(a)
        result = _Lines(self.end, self.end.whole_stand_in(local, weight.shape[1]).shape)
        for lines, arriving in self.arriving(a):
            result.multiply(lines, of(arriving.wait()), weight)
            del arriving
        return Pending(result.all())

    def abt(self, a: Operand, b: Operand) -> Pending:
        weight = self.whole_column(b).t()
        shape = torch.Size((*a.local.shape[:-1], weight.shape[1]))
        sums = self.sums(shape, weight)
        for lines in self.stretches(shape):
            sums.start(lines, times(self.stretch(a.local, lines), weight))
        return sums.pending()

    def atb(self, a: Operand, b: Operand) -> Pending:
        if isinstance(a, OneHotOperand):
            return self._sum_of_parts(a.all, b.local)
        terms = self.weight_gradient(a)
        for lines, arriving in self.arriving(a):
            terms.add(arriving.wait(), self.stretch(b.local, lines))
            del arriving
        return terms.pending()

    def ab_and_atb(self, a: Operand, b: Operand, c: Tensor) -> tuple[Pending, Pending]:
        """A B and Aᵀ C for one gathering of A."""
        shape = self.end.whole_stand_in(tensor_of(a), tensor_of(b).shape[1]).shape
        result, terms = _Lines(self.end, shape), self.weight_gradient(a)
        for lines, arriving in self.arriving(a):
            whole = arriving.wait()
            del arriving
            terms.add(whole, self.stretch(c, lines))
            result.multiply(lines, whole, self.whole_column(b))
            del whole
        return Pending(result.all()), terms.pending()

    def ab_stand_in(self, a: Tensor, b_columns: int) -> Tensor:
        return self.end.whole_stand_in(a, b_columns)

    def abt_stand_in(self, a: Tensor, b_rows: int) -> Tensor:
        return self.end.stand_in(a, torch.Size((*a.shape[:-1], b_rows * self.row.size)))

    def whole_row(self, a: Operand) -> Tensor:
        """All of an activation's row."""
        self._start(a)
        assert a.whole is not None
        return a.whole.wait()

    def whole_column(self, b: Operand) -> Tensor:
        """All of a weight's column."""
        self.ahead(None, b)
        assert b.whole is not None
        return b.whole.wait()

    # --------------------------------------------------------------- in parts

    def stretches(self, shape: torch.Size) -> list[slice]:
        """Of an activation of that shape, the lines of each part."""
        if self.parts == 1:
            return [ALL]
        return self.split(self.end.in_lines(shape), self.parts)

    def stretch(self, x: Matrix, lines: slice) -> Matrix:
        """Some lines of an activation, of a part of it or of all."""
        if isinstance(x, OneHot):
            return OneHot(self.lines(x.tokens.unsqueeze(-1), lines).squeeze(-1), x.first, x.size)
        return self.lines(x, lines)

    def lines(self, x: Tensor, lines: slice) -> Tensor:
        return x if lines == ALL else self.end.stretch(x, lines)

    def arriving(self, a: Operand) -> Iterator[tuple[slice, Pending]]:
        """The lines of an activation, whole, one part of them after the other.

        Who takes a part has it alone, and lets go of it before asking for the next.
        """
        local = tensor_of(a)
        stretches = self.stretches(local.shape)
        if a.whole is not None or len(stretches) == 1:
            yield ALL, self._taken(a)
            return
        coming: list[Pending] = []
        for number, lines in enumerate(stretches):
            coming.append(self.end.whole(self.end.stretch(local, lines)))
            if number:
                yield stretches[number - 1], coming.pop(0)
        yield stretches[-1], coming.pop()

    def is_last(self, lines: slice, shape: torch.Size) -> bool:
        return lines == ALL or lines.stop == self.end.in_lines(shape)

    def sums(self, shape: torch.Size, like: Tensor) -> Sums:
        """Of terms of an activation, whole and of that shape: what this device keeps of it."""
        return Sums(self.end, shape, like)

    def weight_gradient(self, like: Operand) -> WeightGradient:
        """Aᵀ B, for the activations' lines as they come."""
        whole = like.whole is not None
        n_parts = 1 if whole else len(self.stretches(like.local.shape))
        return WeightGradient(self, n_parts)

    def _taken(self, a: Operand) -> Pending:
        self._start(a)
        whole, a.whole = a.whole, None
        assert whole is not None
        return whole

    def _start(self, activation: Operand) -> None:
        if isinstance(activation.local, OneHot):
            return  # every device of a row knows the tokens
        if activation.whole is None:
            activation.whole = self.end.whole(tensor_of(activation))

    def _sum_of_parts(self, whole: Matrix, local: Matrix) -> Pending:
        rows = whole.shape[-1] // self.row.size

        def terms(index: int) -> Tensor:
            part = columns(whole, index * rows, (index + 1) * rows)
            return transposed_times(part, local)

        return comm.start_sum_of_parts(terms, self.row, LABEL)


class Sums:
    """Sums over a row of devices, each cut, of terms that come part by part."""

    def __init__(self, end: End, shape: torch.Size, like: Tensor) -> None:
        self._end = end
        self._result = _Lines(end, end.stand_in(like, shape).shape)
        self._coming: tuple[slice, Pending] | None = None

    def start(self, lines: slice, terms: Tensor) -> None:
        """The sum of these lines, on its way while those of the next are multiplied."""
        self._land()
        self._coming = lines, self._end.cut(terms)

    def pending(self) -> Pending:
        assert self._coming is not None
        lines, last = self._coming
        if lines == ALL:
            return last

        def landed(part: Tensor) -> Tensor:
            self._result.put(lines, part)
            return self._result.all()

        return last.then(landed)

    def _land(self) -> None:
        if self._coming is not None:
            lines, pending = self._coming
            self._coming = None
            self._result.put(lines, pending.wait())


class WeightGradient:
    """Aᵀ B summed down a column of devices, B's lines and A's coming part by part.

    Parts are added up in float32 at least, as one product would.
    """

    def __init__(self, schedule: Gather, n_parts: int) -> None:
        self._schedule, self._n_parts = schedule, n_parts
        self._pending: Pending | None = None
        self._terms: Tensor | None = None
        self._dtype: torch.dtype | None = None

    def add(self, a: Matrix, b: Matrix) -> None:
        if self._n_parts == 1:
            self._pending = self._schedule._sum_of_parts(a, b)
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
        if self._pending is None:
            assert self._terms is not None
            row, terms = self._schedule.row, self._terms.to(self._dtype)
            blocks = dict(enumerate(terms.chunk(row.size)))
            blocks[row.index] = blocks[row.index].clone() if row.size > 1 else terms
            self._terms = None
            del terms  # and its memory, once the other blocks were copied to be sent
            self._pending = comm.start_sum_of_parts(blocks.pop, row, LABEL)
        return self._pending


class _Lines:
    """An activation that is made part by part."""

    def __init__(self, end: End, shape: torch.Size) -> None:
        self._end, self._shape = end, shape
        self._made: Tensor | None = None

    def put(self, lines: slice, part: Tensor) -> None:
        if lines == ALL:
            self._made = part
            return
        self._place(lines, part).copy_(part)

    def multiply(self, lines: slice, a: Tensor, b: Tensor) -> None:
        """Put a [.., K] times b [K, N] there."""
        place = None if lines == ALL else self._place(lines, a)
        if place is not None and place.is_contiguous():
            torch.matmul(a, b, out=place)
        else:
            self.put(lines, times(a, b))

    def all(self) -> Tensor:
        assert self._made is not None
        return self._made

    def _place(self, lines: slice, like: Tensor) -> Tensor:
        if self._made is None:
            self._made = like.new_empty(self._shape)
        return self._end.stretch(self._made, lines)
