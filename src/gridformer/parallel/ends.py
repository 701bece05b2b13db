"""The two ends of a section: how activations lie between sections, whole inside, summed after.

    between sections        whole (enter)    cut (leave)      scheme
    nothing cut             -                all-reduce       Megatron
    s cut over columns      all-gather s     reduce-scatter   Megatron, sequence parallel, and 2-D
    h cut over columns      all-gather h     reduce-scatter   Optimus, `gather` schedule
    b cut over branches     all-gather b     reduce-scatter   SUPER, D&SP
    on the first branch     broadcast        reduce           SUPER, D&SP-cSub

The two are conjugate: backwards, gradients are cut where activations were made whole, and made
whole where activations were cut (specification, section 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gridformer import comm
from gridformer.comm import Axes, Axis, Pending
from gridformer.parallel.scheme import Boundary

LABEL = "product"


class End(Protocol):
    """How activations [b, s, h] lie between sections, over the devices of a row."""

    def whole(self, x: Tensor) -> Pending:
        """This device's part of an activation to all of it."""

    def cut(self, partial: Tensor) -> Pending:
        """Terms of a sum, one on each device, to this device's part of the sum. May overwrite."""

    def whole_stand_in(self, x: Tensor, width: int) -> Tensor:
        """For what a product makes of `whole(x)`: its type and shape, without its memory."""

    def stand_in(self, like: Tensor, shape: torch.Size) -> Tensor:
        """For what `cut` makes of terms of that shape: its type and shape, without its memory."""

    def in_lines(self, shape: torch.Size) -> int:
        """How many lines activations of that shape have: any stretch of them can be made whole, or
        cut, by itself. A part of an activation and all of it have the same number."""

    def stretch(self, x: Tensor, lines: slice) -> Tensor:
        """A view of some lines of an activation, of a part of it or of all."""


def end_of(boundary: Boundary, axes: Axes) -> End:
    """The ends of sections between which activations lie so."""
    axis = axes[boundary.axis]
    if boundary.lies == "replicated":
        return Replicated(axis)
    if boundary.lies == "first":
        return OnFirst(axis, torch.device(axes.device_type))
    return Cut(axis, {"b": 0, "s": 1, "h": -1}[boundary.lies])


@dataclass(frozen=True)
class Replicated:
    """Every device holds all of an activation."""

    col: Axis

    def whole(self, x: Tensor) -> Pending:
        return Pending(x)

    def cut(self, partial: Tensor) -> Pending:
        return comm.start_all_reduce(partial, self.col, label=LABEL)

    def whole_stand_in(self, x: Tensor, width: int) -> Tensor:
        return x.new_empty(()).expand(*x.shape[:-1], width)

    def stand_in(self, like: Tensor, shape: torch.Size) -> Tensor:
        return like.new_empty(()).expand(shape)

    def in_lines(self, shape: torch.Size) -> int:
        return shape[:-1].numel()

    def stretch(self, x: Tensor, lines: slice) -> Tensor:
        return x.flatten(0, -2)[lines]


@dataclass(frozen=True)
class Cut:
    """Activations are cut along `dim`: 0 for b, 1 for s, 2 (or -1) for h."""

    col: Axis
    dim: int

    def whole(self, x: Tensor) -> Pending:
        return comm.start_all_gather(x, self.col, self.dim, LABEL)

    def cut(self, partial: Tensor) -> Pending:
        return comm.start_reduce_scatter(partial, self.col, self.dim, LABEL)

    def whole_stand_in(self, x: Tensor, width: int) -> Tensor:
        sizes = list(x.shape)
        sizes[self.dim] *= self.col.size
        return x.new_empty(()).expand(*sizes[:-1], width)

    def stand_in(self, like: Tensor, shape: torch.Size) -> Tensor:
        sizes = list(shape)
        sizes[self.dim] //= self.col.size
        return like.new_empty(()).expand(sizes)

    def in_lines(self, shape: torch.Size) -> int:
        if self.dim % len(shape) == len(shape) - 1:
            return shape[:-1].numel()
        return shape[self._other(len(shape))]

    def stretch(self, x: Tensor, lines: slice) -> Tensor:
        if self.dim % x.dim() == x.dim() - 1:
            return x.flatten(0, -2)[lines]
        return x[lines] if self._other(x.dim()) == 0 else x[:, lines]

    def _other(self, dims: int) -> int:
        """b where s is cut and s where b is."""
        assert dims == 3, "an activation [b, s, h]"
        return 1 - self.dim


@dataclass(frozen=True)
class OnFirst:
    """The first device holds all of an activation; on the others it is on the meta device, which
    gives its shape and takes neither memory nor arithmetic."""

    col: Axis
    device: torch.device

    def whole(self, x: Tensor) -> Pending:
        first = self.col.index == 0
        real = x.contiguous() if first else torch.empty(x.shape, dtype=x.dtype, device=self.device)
        return comm.start_broadcast(real, self.col, 0, LABEL)

    def cut(self, partial: Tensor) -> Pending:
        total = comm.start_reduce(partial.contiguous(), self.col, 0, LABEL)
        return total if self.col.index == 0 else total.then(lambda x: x.to("meta"))

    def whole_stand_in(self, x: Tensor, width: int) -> Tensor:
        return torch.empty((), dtype=x.dtype, device=self.device).expand(*x.shape[:-1], width)

    def stand_in(self, like: Tensor, shape: torch.Size) -> Tensor:
        if self.col.index:
            return like.new_empty(shape, device="meta")
        return like.new_empty(()).expand(shape)

    def in_lines(self, shape: torch.Size) -> int:
        return shape[:-1].numel()

    def stretch(self, x: Tensor, lines: slice) -> Tensor:
        return x.flatten(0, -2)[lines]
