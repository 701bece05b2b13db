"""The modules of transformers under sub-graph parallelism; see gridformer.parallel.subgraph.

On sub-grids that do not hold the common layers what stands for their results is on the meta device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gridformer import comm
from gridformer.comm import autograd
from gridformer.mesh import Axes, Axis
from gridformer.models import blocks
from gridformer.models.blocks.linear import linear


@dataclass(frozen=True)
class GatheredClock:
    """The clock of a branch in D&SP: its samples are those of all g processes, in their order."""

    clock: blocks.DropoutClock
    branch: Axis

    @property
    def seed(self) -> int:
        return self.clock.seed

    @property
    def step(self) -> int:
        return self.clock.step

    @property
    def first_sample(self) -> int:
        return self.clock.first_sample - self.branch.index * self.clock.n_samples


class GatheredMask(nn.Module):
    """The mask of a branch in D&SP: of the samples of all g processes, in their order."""

    def __init__(self, branch: Axis) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, valid_BS: Tensor) -> Tensor:
        return comm.all_gather(valid_BS, self.branch, 0, "mask")[:, None, None, :]


class SliceLinear(nn.Module):
    """The common projection to q, k or v, and the heads' slices of it for each branch.

    x [b, s, h] to [g b, s, o/g] (D&SP) or [b, s, o/g] (cSub), o = 3h where it makes all three.
    """

    def __init__(self, plain: blocks.Linear, axes: Axes, first: bool) -> None:
        super().__init__()
        self.branch, self.first = axes.branch, first
        self.device = torch.device(axes.device_type)
        self.n_out = plain.weight.shape[1]
        absent = first and self.branch.index > 0
        self.weight = None if absent else plain.weight
        self.bias = None if absent else plain.bias

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is None:
            y = _elsewhere(x, self.n_out)
        else:
            y = linear(x, self.weight, self.bias)
        if self.first:
            return autograd.scatter_gather(y, self.branch, -1, self.device, "slice")
        return autograd.alltoall(y, self.branch, -1, 0, "slice")


class ConcatLinear(nn.Module):
    """The heads' results of all branches joined again, and the common projection of them."""

    def __init__(self, plain: blocks.Linear, axes: Axes, first: bool) -> None:
        super().__init__()
        self.branch, self.first = axes.branch, first
        self.n_out = plain.weight.shape[1]
        absent = first and self.branch.index > 0
        self.weight = None if absent else plain.weight
        self.bias = None if absent else plain.bias

    def forward(self, x: Tensor) -> Tensor:
        if not self.first:
            x = autograd.alltoall(x, self.branch, 0, -1, "concat")
        else:
            x = autograd.gather_scatter(x, self.branch, -1, "concat")
        if self.weight is None:
            return _elsewhere(x, self.n_out)
        return linear(x, self.weight, self.bias)


class NoEmbedding(nn.Module):
    """Shape and type of what is embedded elsewhere."""

    weight = None

    def __init__(self, h: int) -> None:
        super().__init__()
        self.h = h

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return torch.empty(*tokens_BS.shape, self.h, device="meta", requires_grad=True)


class NoPositions(nn.Module):
    def __init__(self, h: int) -> None:
        super().__init__()
        self.h = h

    def forward(self, s: int, start: int = 0, like: Tensor | None = None) -> Tensor:
        return torch.empty(s, self.h, device="meta")


class Elsewhere(nn.Module):
    """A head or a loss that is computed elsewhere: a number without a value, to go back from."""

    def forward(self, x: Tensor, *_: object) -> Tensor:
        return x.sum()


def _elsewhere(x: Tensor, width: int) -> Tensor:
    """On the meta device: what a product makes of x [.., any] elsewhere, [.., width]."""
    return x[..., :1].expand(*x.shape[:-1], width)
