"""Three ways to carry out the three SUMMA products. All give the same blocks of the result.

Van de Geijn and Watts 1997; Optimus (Xu, Li, Gong, You 2021), algorithms 1 to 3, on any r x c grid.
A matrix [M, K] lies with M cut over the rows and K over the columns: device (i, j) holds
[M/r, K/c]. Activations may have several leading dimensions, folded into M.

    product     travels along a row    travels down a column
    C = A B     A                      B
    C = A Bᵀ    C, summed              B
    C = Aᵀ B    A                      C, summed

`Broadcast` sends one panel and multiplies it, then the next (the paper's). `Pipelined` sends panel
l+1 while panel l multiplies. `Gather` (gridformer.parallel.summa.gather) sends all panels at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from gridformer import comm
from gridformer.comm import Axes, Axis, Pending
from gridformer.parallel.ends import LABEL
from gridformer.parallel.summa.operands import (
    Matrix,
    OneHot,
    OneHotOperand,
    Operand,
    tensor_of,
    times,
    transposed_times,
)
from gridformer.parallel.summa.panels import Panel, panels


class Schedule(Protocol):
    """How products communicate. Results may still be on their way."""

    def ab(self, a: Operand, b: Operand) -> Pending:
        """C = A B. a [.., K/c], b [K/r, N/c], result [.., N/c]."""

    def abt(self, a: Operand, b: Operand) -> Pending:
        """C = A Bᵀ. a [.., K/c], b [N/r, K/c], result [.., N/c]."""

    def atb(self, a: Operand, b: Operand) -> Pending:
        """C = Aᵀ B. a [.., M/c], b [.., N/c], leading dimensions alike; result [M/r, N/c]."""

    def ab_stand_in(self, a: Tensor, b_columns: int) -> Tensor:
        """For A B, b having so many columns: its shape and type without its memory."""

    def abt_stand_in(self, a: Tensor, b_rows: int) -> Tensor:
        """The same of A Bᵀ, b having so many rows."""

    def ahead(self, activation: Operand | None, weight: Operand | None) -> None:
        """A hint: these will be needed whole. A schedule may start to gather them."""


class Workspace:
    """Memory for the panels in flight, allocated once and used again by every product."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A contiguous tensor of undefined content; the next `take` of this name overwrites it."""
        key, size = (name, like.dtype, like.device), torch.Size(shape).numel()
        if key not in self._buffers or self._buffers[key].numel() < size:
            self._buffers[key] = like.new_empty(size)
        return self._buffers[key][:size].view(shape)


class Broadcast:
    """The paper's: each panel is broadcast just before it is multiplied, or reduced just after.

    `ahead_by` panels are on their way while one is multiplied: 0 here, 1 in `Pipelined`.
    """

    ahead_by = 0

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self.workspace = Workspace()

    def ahead(self, activation: Operand | None, weight: Operand | None) -> None:
        pass  # panels are sent when their turn comes

    def ab(self, a: Operand, b: Operand) -> Pending:
        k, n = tensor_of(b).shape
        c: Tensor | None = None
        for _, _, a_panel, b_panel in self._arriving(k * self.axes.row.size, a, b):
            assert a_panel is not None
            assert isinstance(b_panel, Tensor)
            if c is None:
                c = times(a_panel, b_panel)
            elif isinstance(a_panel, OneHot):
                c += times(a_panel, b_panel)
            else:
                c.view(-1, n).addmm_(a_panel.flatten(0, -2), b_panel)
        assert c is not None
        return Pending(c)

    def abt(self, a: Operand, b: Operand) -> Pending:
        like = tensor_of(b)
        size = like.shape[0] * self.axes.row.size
        c = like.new_empty((*a.local.shape[:-1], size // self.axes.col.size))
        summing = _Sums(self.axes.col, self.ahead_by)
        for turn, panel, _, b_panel in self._arriving(size, None, b):
            assert isinstance(b_panel, Tensor)
            terms = self.workspace.take(f"sum {turn}", (*c.shape[:-1], panel.width), like)
            if isinstance(a.local, OneHot):
                terms.copy_(times(a.local, b_panel.t()))
            else:
                torch.matmul(a.local, b_panel.t(), out=terms)
            summing.start(terms, panel.col, c[..., panel.in_col])
        summing.finish()
        return Pending(c)

    def ab_stand_in(self, a: Tensor, b_columns: int) -> Tensor:
        return a.new_empty(()).expand(*a.shape[:-1], b_columns)

    def abt_stand_in(self, a: Tensor, b_rows: int) -> Tensor:
        width = b_rows * self.axes.row.size // self.axes.col.size
        return a.new_empty(()).expand(*a.shape[:-1], width)

    def atb(self, a: Operand, b: Operand) -> Pending:
        m, n = a.local.shape[-1], b.local.shape[-1]
        like = a.local if isinstance(a.local, Tensor) else tensor_of(b)
        size = m * self.axes.col.size
        c = like.new_empty((size // self.axes.row.size, n))
        summing = _Sums(self.axes.row, self.ahead_by)
        for turn, panel, a_panel, _ in self._arriving(size, a, None):
            assert a_panel is not None
            terms = self.workspace.take(f"sum {turn}", (panel.width, n), like)
            if isinstance(a_panel, OneHot) or isinstance(b.local, OneHot):
                terms.copy_(transposed_times(a_panel, b.local))
            else:
                torch.mm(a_panel.flatten(0, -2).t(), b.local.flatten(0, -2), out=terms)
            summing.start(terms, panel.row, c[panel.in_row])
        summing.finish()
        return Pending(c)

    def _arriving(
        self, size: int, a: Operand | None, b: Operand | None
    ) -> Iterator[tuple[int, Panel, Matrix | None, Tensor | None]]:
        """The panels of a dimension, with the operands' parts of each once they are here.

        Of `a` a panel travels along the rows, of `b` down the columns. Before each stands its turn
        in the workspace.
        """
        turns = self.ahead_by + 1
        coming: deque[Callable[[], tuple[int, Panel, Matrix | None, Tensor | None]]] = deque()
        for number, panel in enumerate(panels(size, self.axes.row.size, self.axes.col.size)):
            a_part = self._send_columns(a, panel, number % turns) if a else None
            b_part = self._send_rows(b, panel, number % turns) if b else None
            coming.append(partial(_arrived, number % turns, panel, a_part, b_part))
            if len(coming) == turns:
                yield coming.popleft()()
        while coming:
            yield coming.popleft()()

    def _send_columns(self, a: Operand, panel: Panel, turn: int) -> Pending | OneHot:
        """Columns of an activation, from their owner to the other devices of its row."""
        if isinstance(a, OneHotOperand):
            return a.all.columns(panel.start, panel.stop)
        axis, local = self.axes.col, tensor_of(a)
        if axis.size == 1:
            return Pending(local[..., panel.in_col])
        part = self.workspace.take(f"a {turn}", (*local.shape[:-1], panel.width), local)
        if axis.index == panel.col:
            part.copy_(local[..., panel.in_col])
        return self._broadcast(part, axis, panel.col)

    def _send_rows(self, b: Operand, panel: Panel, turn: int) -> Pending:
        """Rows of a weight, from their owner to the other devices of its column."""
        axis, local = self.axes.row, tensor_of(b)
        if axis.size == 1:
            return Pending(local[panel.in_row])
        if axis.index == panel.row and local.is_contiguous():
            return self._broadcast(local[panel.in_row], axis, panel.row)  # read where it lies
        part = self.workspace.take(f"b {turn}", (panel.width, local.shape[1]), local)
        if axis.index == panel.row:
            part.copy_(local[panel.in_row])
        return self._broadcast(part, axis, panel.row)

    def _broadcast(self, part: Tensor, axis: Axis, root: int) -> Pending:
        if self.ahead_by:
            return comm.start_broadcast(part, axis, root, LABEL)
        return Pending(comm.broadcast(part, axis, root, LABEL))


class Pipelined(Broadcast):
    """Panel l+1 travels, and the sum of panel l-1 returns, while panel l multiplies."""

    ahead_by = 1


class _Sums:
    """Sums over an axis, each kept by its owner; `ahead_by` of them may be on their way."""

    def __init__(self, axis: Axis, ahead_by: int) -> None:
        self.axis, self.ahead_by = axis, ahead_by
        self._coming: deque[Callable[[], None]] = deque()

    def start(self, terms: Tensor, owner: int, place: Tensor) -> None:
        """Add up every rank's `terms`; on the owner the sum goes to `place`."""
        if self.ahead_by:
            pending = comm.start_reduce(terms, self.axis, owner, LABEL)
        else:
            pending = Pending(comm.reduce(terms, self.axis, owner, LABEL))

        def land() -> None:
            total = pending.wait()
            if self.axis.index == owner:
                place.copy_(total)

        self._coming.append(land)
        while len(self._coming) > self.ahead_by:
            self._coming.popleft()()

    def finish(self) -> None:
        while self._coming:
            self._coming.popleft()()


def _arrived(
    turn: int, panel: Panel, a: Pending | OneHot | None, b: Pending | None
) -> tuple[int, Panel, Matrix | None, Tensor | None]:
    a_part = a.wait() if isinstance(a, Pending) else a
    return turn, panel, a_part, b.wait() if b else None
