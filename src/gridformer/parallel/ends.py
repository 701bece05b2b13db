"""The two ends of a section: how activations lie between sections, whole inside, summed after.

    between sections        whole (enter)    cut (leave)      scheme
    nothing cut             -                all-reduce       Megatron
    s cut over columns      all-gather s     reduce-scatter   Megatron, sequence parallel
    h cut over columns      all-gather h     reduce-scatter   Optimus, `gather` schedule

The two are conjugate: backwards, gradients are cut where activations were made whole, and made
whole where activations were cut (specification, section 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gridformer import comm
from gridformer.comm import Axis, Pending

LABEL = "product"


class End(Protocol):
    """How activations [b, s, h] lie between sections, over the devices of a row."""

    def whole(self, x: Tensor) -> Pending:
        """This device's part of an activation to all of it."""

    def cut(self, partial: Tensor) -> Pending:
        """Terms of a sum, one on each device, to this device's part of the sum. May overwrite."""

    def cut_shape(self, shape: torch.Size) -> torch.Size:
        """What `cut` makes of a shape."""


@dataclass(frozen=True)
class Replicated:
    """Every device holds all of an activation."""

    col: Axis

    def whole(self, x: Tensor) -> Pending:
        return Pending(x)

    def cut(self, partial: Tensor) -> Pending:
        return comm.start_all_reduce(partial, self.col, label=LABEL)

    def cut_shape(self, shape: torch.Size) -> torch.Size:
        return shape


@dataclass(frozen=True)
class Cut:
    """Activations are cut along `dim`: 1 for s, 2 (or -1) for h."""

    col: Axis
    dim: int

    def whole(self, x: Tensor) -> Pending:
        return comm.start_all_gather(x, self.col, self.dim, LABEL)

    def cut(self, partial: Tensor) -> Pending:
        return comm.start_reduce_scatter(partial, self.col, self.dim, LABEL)

    def cut_shape(self, shape: torch.Size) -> torch.Size:
        sizes = list(shape)
        sizes[self.dim] //= self.col.size
        return torch.Size(sizes)
