"""The three products of SUMMA, panel by panel: C = A B, C = A Bᵀ and C = Aᵀ B.

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
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gridformer import comm
from gridformer.comm import Pending
from gridformer.mesh import Axes, Axis
from gridformer.models.blocks.gradient_sum import GradientSum
from gridformer.models.kernels.products import add_product, wide_product
from gridformer.parallel.tensor.summa.gathered import (
    LABEL,
    OneHot,
    Operand,
    add_bias,
    times,
    transposed_times,
)


@dataclass(frozen=True)
class Panel:
    """The range [start, stop) of a dimension, and its position in the blocks of its owners.

    Attributes:
        col: Column of devices that owns the range where the dimension is sharded over columns.
        row: Row of devices that owns it where the dimension is sharded over rows.
        in_col: The range within the block of column `col`.
        in_row: The range within the block of row `row`.
    """

    start: int
    stop: int
    col: int
    row: int
    in_col: slice
    in_row: slice

    @property
    def width(self) -> int:
        return self.stop - self.start


def panels(size: int, rows: int, cols: int) -> Iterator[Panel]:
    """Yields the panels of a dimension that is sharded over rows in one matrix, columns in another.

    They are the common refinement of both ways to shard it: rows + cols - gcd(rows, cols) panels.
    The global size of the dimension must be divisible by `rows` and by `cols`.
    """
    per_row, per_col = size // rows, size // cols
    cuts = sorted({*range(0, size, per_row), *range(0, size, per_col), size})
    for start, stop in pairwise(cuts):
        col, row = start // per_col, start // per_row
        yield Panel(
            start=start,
            stop=stop,
            col=col,
            row=row,
            in_col=slice(start - col * per_col, stop - col * per_col),
            in_row=slice(start - row * per_row, stop - row * per_row),
        )


class Broadcast:
    """The schedule of the paper: broadcast a panel, multiply it, then reduce its sum.

    `in_flight` is the number of panels, and of sums, that travel while another panel is multiplied:
    0 here, and 1 in `Pipelined`.
    """

    in_flight = 0
    adds_gradients = sums_elsewhere = False

    def __init__(self, axes: Axes) -> None:
        self.row, self.col = axes.row, axes.col
        self.workspace = Workspace()

    @property
    def in_backward(self) -> Broadcast:
        """The schedule of the gradients of A B."""
        return self

    # ------------------------------------------------------------------ the algorithms

    def ab(self, a: Operand, b: Operand, bias: Tensor | None = None) -> Tensor:
        """Optimus, Algorithm 1: for each panel l, C_ij += A_il B_lj; then adds a bias [N/c]."""
        c: Tensor | None = None
        # Panels of bfloat16 and float16 are accumulated in float32.
        wide = torch.promote_types(b.local.dtype, torch.float32)
        for _, a_il, b_lj in self._arriving(b.local.shape[0] * self.row.size, a, b):
            if isinstance(a_il, OneHot):
                terms = times(a_il, b_lj)
                c = terms.to(wide) if c is None else c.add_(terms)
            elif c is None:
                c = wide_product(a_il.flatten(0, -2), b_lj, wide).view(*a_il.shape[:-1], -1)
            else:
                add_product(c.view(-1, c.shape[-1]), a_il.flatten(0, -2), b_lj)
        assert c is not None
        c = c.to(b.local.dtype)
        if bias is not None:
            add_bias(c, bias)
        return c

    def abt(self, a: Operand, b: Operand) -> Pending:
        """Optimus, Algorithm 2: for each panel l, reduce A_ij B_ljᵀ over j to C_il on its owner."""
        n = b.local.shape[0] * self.row.size
        c = b.local.new_empty((*a.local.shape[:-1], n // self.col.size))
        sums = PanelSums(self.col, self.in_flight, self.workspace)
        for panel, _, b_lj in self._arriving(n, None, b):
            place = c[..., panel.in_col]
            terms = sums.buffer((*c.shape[:-1], panel.width), b.local, panel.col, place)
            if isinstance(a.local, OneHot):
                terms.copy_(times(a.local, b_lj.t()))
            else:
                torch.matmul(a.local, b_lj.t(), out=terms)
            sums.start(terms, panel.col, place)
        sums.finish()
        return Pending(c)

    def atb(self, a: Operand, b: Operand, into: GradientSum | None = None) -> Pending:
        """Optimus, Algorithm 3: for each panel l, reduce A_ilᵀ B_ij over i to C_lj on its owner."""
        one_hot = isinstance(a.local, OneHot) or isinstance(b.local, OneHot)
        like = b.local if isinstance(a.local, OneHot) else a.local
        m, n = a.local.shape[-1] * self.col.size, b.local.shape[-1]
        c = like.new_empty((m // self.row.size, n))
        sums = PanelSums(self.row, self.in_flight, self.workspace)
        for panel, a_il, _ in self._arriving(m, a, None):
            place = c[panel.in_row]
            terms = sums.buffer((panel.width, n), like, panel.row, place)
            if one_hot:
                terms.copy_(transposed_times(a_il, b.local))
            else:
                torch.mm(a_il.flatten(0, -2).t(), b.local.flatten(0, -2), out=terms)
            sums.start(terms, panel.row, place)
        sums.finish()
        return Pending(c)

    def ab_and_atb(
        self, a: Operand, b: Operand, c: Operand, into: GradientSum | None = None
    ) -> tuple[Tensor, Pending]:
        """Computes A B and Aᵀ C. The panels of A travel twice."""
        atc = self.atb(a, c, into)
        return self.ab(a, b), atc

    def start(self, activation: Operand | None, weight: Operand | None) -> None:
        """Does nothing: each panel is broadcast only when the loop reaches it."""

    def shape_of_ab(self, a: Tensor, n_columns: int) -> list[int]:
        """Returns the shape of A B for a local block [.., K/c] of A and [K/r, n_columns] of B."""
        return [*a.shape[:-1], n_columns]

    def shape_of_abt(self, a: Tensor, n_rows: int) -> list[int]:
        """Returns the shape of A Bᵀ for a local block [.., K/c] of A and [n_rows, K/c] of B."""
        return [*a.shape[:-1], n_rows * self.row.size // self.col.size]

    # ------------------------------------------------------------------ the transport of panels

    def _arriving(
        self, size: int, along_rows: Operand | None, down_columns: Operand | None
    ) -> Iterator[tuple[Panel, Any, Any]]:
        """Yields the panels of a dimension in order, each when its parts of the operands are here.

        The workspace has `in_flight + 1` slots for each kind of panel: one for the panel that is
        multiplied and one for each panel that travels.

        Args:
            size: Global size of the dimension, divisible by the numbers of rows and columns.
            along_rows: Activation [.., size/c] whose columns are broadcast along each row.
            down_columns: Weight [size/r, N/c] whose rows are broadcast down each column.

        Yields:
            Each panel with a [.., width] and b [width, N/c], None where not requested: views of the
            workspace or of the operands, valid until the next panel is requested.
        """
        coming: deque[tuple[Panel, Pending | None, Pending | None]] = deque()
        for number, panel in enumerate(panels(size, self.row.size, self.col.size)):
            slot = number % (self.in_flight + 1)
            a = self._send_columns(along_rows, panel, slot) if along_rows else None
            b = self._send_rows(down_columns, panel, slot) if down_columns else None
            coming.append((panel, a, b))
            if len(coming) > self.in_flight:
                yield _arrived(*coming.popleft())
        while coming:
            yield _arrived(*coming.popleft())

    def _send_columns(self, a: Operand, panel: Panel, slot: int) -> Pending:
        """Broadcasts columns of an activation from their owner along the row of devices."""
        if isinstance(a.local, OneHot):
            return Pending(a.local.columns(panel.start, panel.stop))  # type: ignore[arg-type]
        local, mine = a.local, self.col.index == panel.col
        columns: Tensor = local[..., panel.in_col]
        if self.col.size == 1:
            return Pending(columns)
        if mine and columns.is_contiguous():
            return self._send(columns, self.col, panel.col)  # no copy
        part = self.workspace.take(f"a {slot}", (*local.shape[:-1], panel.width), local)
        if mine:
            part.copy_(columns)
        return self._send(part, self.col, panel.col)

    def _send_rows(self, b: Operand, panel: Panel, slot: int) -> Pending:
        """Broadcasts rows of a weight from their owner down the column of devices."""
        local, mine = b.local, self.row.index == panel.row
        if self.row.size == 1:
            return Pending(local[panel.in_row])
        if mine and local.is_contiguous():
            return self._send(local[panel.in_row], self.row, panel.row)  # no copy
        part = self.workspace.take(f"b {slot}", (panel.width, local.shape[1]), local)
        if mine:
            part.copy_(local[panel.in_row])
        return self._send(part, self.row, panel.row)

    def _send(self, part: Tensor, axis: Axis, root: int) -> Pending:
        return comm.start_broadcast(part, axis, root, LABEL, later=self.in_flight > 0)


class Pipelined(Broadcast):
    """Broadcasts panel l+1 and reduces the sum of panel l-1 while panel l multiplies."""

    in_flight = 1


class Workspace:
    """Buffers for the panels in flight, allocated once and reused by every product."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Returns a contiguous, uninitialized tensor with the dtype and device of `like`.

        The next `take` of the same name returns the same memory. A buffer grows when a larger one
        is asked for, and never shrinks.
        """
        key, size = (name, like.dtype, like.device), torch.Size(shape).numel()
        if key not in self._buffers or self._buffers[key].numel() < size:
            self._buffers[key] = like.new_empty(size)
        return self._buffers[key][:size].view(shape)


class PanelSums:
    """Reduces partial sums over an axis, each to its owner, with `in_flight` of them on the way."""

    def __init__(self, axis: Axis, in_flight: int, workspace: Workspace) -> None:
        self.axis, self.in_flight, self.workspace = axis, in_flight, workspace
        self._number = 0
        self._coming: deque[tuple[Pending, int, Tensor]] = deque()

    def buffer(self, shape: tuple[int, ...], like: Tensor, owner: int, place: Tensor) -> Tensor:
        """Returns uninitialized memory for the partial sum of the next panel: `place` if it can."""
        if self.axis.index == owner and place.is_contiguous():
            return place
        slot = self._number % (self.in_flight + 1)
        self._number += 1
        return self.workspace.take(f"sum {slot}", shape, like)

    def start(self, terms: Tensor, owner: int, place: Tensor) -> None:
        """Starts to reduce the `terms` of all ranks, from `buffer`, to `place` on the owner."""
        total = comm.start_reduce(terms, self.axis, owner, LABEL, later=self.in_flight > 0)
        self._coming.append((total, owner, place))
        self.finish(self.in_flight)

    def finish(self, but: int = 0) -> None:
        """Waits for all sums that are still on the way but the last `but`."""
        while len(self._coming) > but:
            pending, owner, place = self._coming.popleft()
            total = pending.wait()
            if self.axis.index == owner and total is not place:
                place.copy_(total)


def _arrived(panel: Panel, a: Pending | None, b: Pending | None) -> tuple[Panel, Any, Any]:
    return panel, a.wait() if a else None, b.wait() if b else None
