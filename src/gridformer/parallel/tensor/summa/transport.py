"""Moves panels: broadcasts those of operands, reduces those of results, and owns their buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gridformer import comm
from gridformer.comm import Pending
from gridformer.mesh import Axes, Axis
from gridformer.parallel.tensor.boundary import LABEL
from gridformer.parallel.tensor.summa.operands import OneHot, OneHotOperand, Operand, tensor_of
from gridformer.parallel.tensor.summa.panels import Panel, panels


class Arrived(NamedTuple):
    """A panel of each requested operand: a is a Matrix, b a Tensor; None where not requested."""

    panel: Panel
    a: Any
    b: Any


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


class PanelTransport:
    """Broadcasts panels and reduces sums, with `in_flight` of each on the way during a product.

    The workspace has `in_flight + 1` slots for each kind of panel: one for the panel that is
    multiplied and one for each panel that travels.
    """

    def __init__(self, axes: Axes, in_flight: int) -> None:
        self.axes, self.in_flight = axes, in_flight
        self.workspace = Workspace()

    def broadcast(
        self, size: int, along_rows: Operand | None = None, down_columns: Operand | None = None
    ) -> Iterator[Arrived]:
        """Yields the panels of a dimension in order, each when its parts of the operands are here.

        Args:
            size: Global size of the dimension, divisible by the numbers of rows and columns.
            along_rows: Activation [.., size/c] whose columns are broadcast along each row.
            down_columns: Weight [size/r, N/c] whose rows are broadcast down each column.

        Yields:
            Each panel with a [.., width] and b [width, N/c]: views of the workspace or of the
            operands, valid until the next panel is requested.
        """
        slots = self.in_flight + 1
        coming: deque[Callable[[], Arrived]] = deque()
        for number, panel in enumerate(panels(size, self.axes.row.size, self.axes.col.size)):
            slot = number % slots
            a = self._send_columns(along_rows, panel, slot) if along_rows else None
            b = self._send_rows(down_columns, panel, slot) if down_columns else None
            coming.append(partial(_arrived, panel, a, b))
            if len(coming) == slots:
                yield coming.popleft()()
        while coming:
            yield coming.popleft()()

    def reduce(self, axis: Axis) -> PanelSums:
        """Returns the sums over `axis` that the panels of one product make."""
        return PanelSums(axis, self.in_flight, self.workspace)

    def _send_columns(self, a: Operand, panel: Panel, slot: int) -> Pending | OneHot:
        """Broadcasts columns of an activation from their owner along the row of devices."""
        if isinstance(a, OneHotOperand):
            return a.all.columns(panel.start, panel.stop)
        axis, local = self.axes.col, tensor_of(a)
        if axis.size == 1:
            return Pending(local[..., panel.in_col])
        part = self.workspace.take(f"a {slot}", (*local.shape[:-1], panel.width), local)
        if axis.index == panel.col:
            part.copy_(local[..., panel.in_col])
        return self._start_broadcast(part, axis, panel.col)

    def _send_rows(self, b: Operand, panel: Panel, slot: int) -> Pending:
        """Broadcasts rows of a weight from their owner down the column of devices."""
        axis, local = self.axes.row, tensor_of(b)
        if axis.size == 1:
            return Pending(local[panel.in_row])
        if axis.index == panel.row and local.is_contiguous():
            return self._start_broadcast(local[panel.in_row], axis, panel.row)  # no copy
        part = self.workspace.take(f"b {slot}", (panel.width, local.shape[1]), local)
        if axis.index == panel.row:
            part.copy_(local[panel.in_row])
        return self._start_broadcast(part, axis, panel.row)

    def _start_broadcast(self, part: Tensor, axis: Axis, root: int) -> Pending:
        if self.in_flight:
            return comm.start_broadcast(part, axis, root, LABEL)
        return Pending(comm.broadcast(part, axis, root, LABEL))


class PanelSums:
    """Reduces partial sums over an axis, each to its owner, with `in_flight` of them on the way."""

    def __init__(self, axis: Axis, in_flight: int, workspace: Workspace) -> None:
        self.axis, self.in_flight, self.workspace = axis, in_flight, workspace
        self._number = 0
        self._coming: deque[Callable[[], None]] = deque()

    def buffer(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Returns an uninitialized buffer for the partial sum of the next panel."""
        slot = self._number % (self.in_flight + 1)
        self._number += 1
        return self.workspace.take(f"sum {slot}", shape, like)

    def start(self, terms: Tensor, owner: int, place: Tensor) -> None:
        """Starts to reduce the `terms` of all ranks, and copies the total to `place` on the owner.

        Args:
            terms: This rank's partial sum, from `buffer`.
            owner: Index along the axis of the rank that keeps the total.
            place: Destination of the total; used on the owner alone.
        """
        if self.in_flight:
            pending = comm.start_reduce(terms, self.axis, owner, LABEL)
        else:
            pending = Pending(comm.reduce(terms, self.axis, owner, LABEL))

        def store() -> None:
            total = pending.wait()
            if self.axis.index == owner:
                place.copy_(total)

        self._coming.append(store)
        while len(self._coming) > self.in_flight:
            self._coming.popleft()()

    def finish(self) -> None:
        """Waits for all sums that are still on the way."""
        while self._coming:
            self._coming.popleft()()


def _arrived(panel: Panel, a: Pending | OneHot | None, b: Pending | None) -> Arrived:
    a_part = a.wait() if isinstance(a, Pending) else a
    return Arrived(panel, a_part, b.wait() if b else None)
