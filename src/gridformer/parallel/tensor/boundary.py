"""How activations are sharded between sections, gathered inside a section, and summed after it.

    between sections          gather (enter)   reduce_scatter   scheme
    replicated                -                all-reduce       Megatron
    s sharded over columns    all-gather s     reduce-scatter   Megatron, sequence parallel, and 2-D
    h sharded over columns    all-gather h     reduce-scatter   Optimus, `gather` schedule
    b sharded over branches   all-gather b     reduce-scatter   SUPER, D&SP
    on the first branch       broadcast        reduce           SUPER, D&SP-cSub

The two form a conjugate pair: in the backward pass, gradients are reduce-scattered where
activations were gathered, and gathered where activations were reduce-scattered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gridformer import comm
from gridformer.comm import Pending
from gridformer.mesh import Axes, Axis
from gridformer.parallel.scheme import BoundarySpec

LABEL = "product"


class Boundary(Protocol):
    """How activations [b, s, h] are sharded between sections over the devices of a row."""

    def gather(self, x: Tensor) -> Pending:
        """Starts to gather the full activation from this device's part x of it."""

    def reduce_scatter(self, partial: Tensor) -> Pending:
        """Starts to sum `partial` over devices, each of which keeps its part; may overwrite it."""

    def empty_gathered_like(self, x: Tensor, width: int) -> Tensor:
        """Returns a tensor shaped as the gathered x but with `width` as its last dimension.

        It stands for the result of a product and holds at most one element.

        Args:
            x: This device's part of an activation [b, s, h].
            width: The size of the last dimension.
        """

    def empty_result_like(self, like: Tensor, shape: torch.Size) -> Tensor:
        """Returns a tensor with the shape and dtype of a reduce-scattered sum.

        It holds at most one element.

        Args:
            like: Gives dtype and device.
            shape: Shape of each partial sum.
        """

    def max_chunks(self, shape: torch.Size) -> int:
        """Returns the most chunks of activations of that shape, full or sharded alike.

        A chunk is a range of indices of a dimension that is not sharded, so any chunk can be
        gathered or reduce-scattered by itself. The smallest chunk is one index.
        """

    def chunk(self, x: Tensor, indices: slice) -> Tensor:
        """Returns a view of a chunk of an activation, whether full or sharded.

        Args:
            x: An activation, full or this device's part.
            indices: A range of the dimension that is cut into chunks; see `max_chunks`.
        """


def boundary_of(spec: BoundarySpec, axes: Axes) -> Boundary:
    """Returns the boundary that a scheme's `BoundarySpec` describes."""
    axis = axes[spec.axis]
    if spec.lies == "replicated":
        return Replicated(axis)
    if spec.lies == "first":
        return OnFirst(axis, torch.device(axes.device_type))
    return Sharded(axis, {"b": 0, "s": 1, "h": -1}[spec.lies])


@dataclass(frozen=True)
class Replicated:
    """Activations are replicated: `gather` does nothing, and `reduce_scatter` is an all-reduce."""

    col: Axis

    def gather(self, x: Tensor) -> Pending:
        return Pending(x)

    def reduce_scatter(self, partial: Tensor) -> Pending:
        return comm.start_all_reduce(partial, self.col, label=LABEL)

    def empty_gathered_like(self, x: Tensor, width: int) -> Tensor:
        return x.new_empty(()).expand(*x.shape[:-1], width)

    def empty_result_like(self, like: Tensor, shape: torch.Size) -> Tensor:
        return like.new_empty(()).expand(shape)

    def max_chunks(self, shape: torch.Size) -> int:
        return shape[:-1].numel()

    def chunk(self, x: Tensor, indices: slice) -> Tensor:
        return x.flatten(0, -2)[indices]


@dataclass(frozen=True)
class Sharded:
    """Activations are sharded along `dim`: 0 for b, 1 for s, 2 (or -1) for h."""

    col: Axis
    dim: int

    def gather(self, x: Tensor) -> Pending:
        return comm.start_all_gather(x, self.col, self.dim, LABEL)

    def reduce_scatter(self, partial: Tensor) -> Pending:
        return comm.start_reduce_scatter(partial, self.col, self.dim, LABEL)

    def empty_gathered_like(self, x: Tensor, width: int) -> Tensor:
        sizes = list(x.shape)
        sizes[self.dim] *= self.col.size
        return x.new_empty(()).expand(*sizes[:-1], width)

    def empty_result_like(self, like: Tensor, shape: torch.Size) -> Tensor:
        sizes = list(shape)
        sizes[self.dim] //= self.col.size
        return like.new_empty(()).expand(sizes)

    def max_chunks(self, shape: torch.Size) -> int:
        if self.dim % len(shape) == len(shape) - 1:
            return shape[:-1].numel()
        return shape[self._other(len(shape))]

    def chunk(self, x: Tensor, indices: slice) -> Tensor:
        if self.dim % x.dim() == x.dim() - 1:
            return x.flatten(0, -2)[indices]
        return x[indices] if self._other(x.dim()) == 0 else x[:, indices]

    def _other(self, dims: int) -> int:
        """Returns the dimension b if s is sharded, and s if b is."""
        assert dims == 3, "an activation [b, s, h]"
        return 1 - self.dim


@dataclass(frozen=True)
class OnFirst:
    """The first device holds the full activation; the others hold a tensor on the meta device.

    The meta tensor gives the shape and takes neither memory nor arithmetic. `gather` is a broadcast
    and `reduce_scatter` a reduce.
    """

    col: Axis
    device: torch.device

    def gather(self, x: Tensor) -> Pending:
        first = self.col.index == 0
        real = x.contiguous() if first else torch.empty(x.shape, dtype=x.dtype, device=self.device)
        return comm.start_broadcast(real, self.col, 0, LABEL)

    def reduce_scatter(self, partial: Tensor) -> Pending:
        total = comm.start_reduce(partial.contiguous(), self.col, 0, LABEL)
        return total if self.col.index == 0 else total.then(lambda x: x.to("meta"))

    def empty_gathered_like(self, x: Tensor, width: int) -> Tensor:
        return torch.empty((), dtype=x.dtype, device=self.device).expand(*x.shape[:-1], width)

    def empty_result_like(self, like: Tensor, shape: torch.Size) -> Tensor:
        if self.col.index:
            return like.new_empty(shape, device="meta")
        return like.new_empty(()).expand(shape)

    def max_chunks(self, shape: torch.Size) -> int:
        return shape[:-1].numel()

    def chunk(self, x: Tensor, indices: slice) -> Tensor:
        return x.flatten(0, -2)[indices]
