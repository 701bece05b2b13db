"""How panels travel: one at a time, or the next while one is multiplied; and where they lie."""

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
    """A panel of both operands, as far as they were asked for: a (Matrix) and b (Tensor)."""

    panel: Panel
    a: Any
    b: Any


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


class PanelTransport:
    """Broadcasts panels and reduces sums, `in_flight` of each at a time while one is multiplied.

    Each of `in_flight + 1` panels in flight has its own turn in the workspace.
    """

    def __init__(self, axes: Axes, in_flight: int) -> None:
        self.axes, self.in_flight = axes, in_flight
        self.workspace = Workspace()

    def broadcast(
        self, size: int, along_rows: Operand | None = None, down_columns: Operand | None = None
    ) -> Iterator[Arrived]:
        """The panels of a dimension in order, each when its parts of the operands are here."""
        turns = self.in_flight + 1
        coming: deque[Callable[[], Arrived]] = deque()
        for number, panel in enumerate(panels(size, self.axes.row.size, self.axes.col.size)):
            turn = number % turns
            a = self._send_columns(along_rows, panel, turn) if along_rows else None
            b = self._send_rows(down_columns, panel, turn) if down_columns else None
            coming.append(partial(_arrived, panel, a, b))
            if len(coming) == turns:
                yield coming.popleft()()
        while coming:
            yield coming.popleft()()

    def reduce(self, axis: Axis) -> PanelSums:
        """Sums of a product's panels over an axis."""
        return PanelSums(axis, self.in_flight, self.workspace)

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
        return self._start_broadcast(part, axis, panel.col)

    def _send_rows(self, b: Operand, panel: Panel, turn: int) -> Pending:
        """Rows of a weight, from their owner to the other devices of its column."""
        axis, local = self.axes.row, tensor_of(b)
        if axis.size == 1:
            return Pending(local[panel.in_row])
        if axis.index == panel.row and local.is_contiguous():
            return self._start_broadcast(local[panel.in_row], axis, panel.row)  # where it lies
        part = self.workspace.take(f"b {turn}", (panel.width, local.shape[1]), local)
        if axis.index == panel.row:
            part.copy_(local[panel.in_row])
        return self._start_broadcast(part, axis, panel.row)

    def _start_broadcast(self, part: Tensor, axis: Axis, root: int) -> Pending:
        if self.in_flight:
            return comm.start_broadcast(part, axis, root, LABEL)
        return Pending(comm.broadcast(part, axis, root, LABEL))


class PanelSums:
    """Sums over an axis, each kept by its owner; `in_flight` of them may be on their way."""

    def __init__(self, axis: Axis, in_flight: int, workspace: Workspace) -> None:
        self.axis, self.in_flight, self.workspace = axis, in_flight, workspace
        self._number = 0
        self._coming: deque[Callable[[], None]] = deque()

    def room(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Where the terms of the next sum are put."""
        turn = self._number % (self.in_flight + 1)
        self._number += 1
        return self.workspace.take(f"sum {turn}", shape, like)

    def start(self, terms: Tensor, owner: int, place: Tensor) -> None:
        """Add up every rank's `terms`; on the owner the sum goes to `place`."""
        if self.in_flight:
            pending = comm.start_reduce(terms, self.axis, owner, LABEL)
        else:
            pending = Pending(comm.reduce(terms, self.axis, owner, LABEL))

        def land() -> None:
            total = pending.wait()
            if self.axis.index == owner:
                place.copy_(total)

        self._coming.append(land)
        while len(self._coming) > self.in_flight:
            self._coming.popleft()()

    def finish(self) -> None:
        while self._coming:
            self._coming.popleft()()


def _arrived(panel: Panel, a: Pending | OneHot | None, b: Pending | None) -> Arrived:
    a_part = a.wait() if isinstance(a, Pending) else a
    return Arrived(panel, a_part, b.wait() if b else None)
