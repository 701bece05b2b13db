"""Shards the saved inputs of recomputed blocks over devices that would each hold them in full.

Optimus and sequence-parallel Megatron have these inputs sharded already, D&SP over its samples.
With the two classes here, a device keeps b s h / p elements per block under every scheme.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gridformer import comm
from gridformer.mesh import Axis

LABEL = "kept"


@dataclass(frozen=True)
class PartitionedActivations:
    """All devices of an axis have x: each keeps an equal part, and an all-gather restores x."""

    axis: Axis

    def part(self, x: Tensor) -> Tensor:
        return _parts(x, self.axis.size)[self.axis.index].clone()

    def whole(self, part: Tensor, like: torch.Size) -> Tensor:
        joined = comm.all_gather(part, self.axis, 0, LABEL)
        return joined[: like.numel()].view(like)


@dataclass(frozen=True)
class PartitionedFromFirst:
    """Only the first device of an axis has x: it scatters equal parts and gathers them (cSub).

    Parts are on `device`; on all ranks but the first, x itself is on the meta device.
    """

    axis: Axis
    device: torch.device

    def part(self, x: Tensor) -> Tensor:
        width = -(-x.numel() // self.axis.size)
        pieces = None if x.is_meta else [*_parts(x, self.axis.size)]
        out = torch.empty(width, dtype=x.dtype, device=self.device)
        return comm.scatter(pieces, out, self.axis, 0, LABEL)

    def whole(self, part: Tensor, like: torch.Size) -> Tensor:
        pieces = comm.gather(part, [part.shape] * self.axis.size, self.axis, 0, LABEL)
        if pieces is None:
            return torch.empty(like, dtype=part.dtype, device="meta")
        return torch.cat(pieces)[: like.numel()].view(like)


def _parts(x: Tensor, size: int) -> Tensor:
    """Reshapes x to [size, width], padded with zeros at the end."""
    width = -(-x.numel() // size)
    return F.pad(x.reshape(-1), (0, width * size - x.numel())).view(size, width)
