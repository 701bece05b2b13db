"""The modules of transformers under sub-graph parallelism; see gridformer.parallel.subgraph.

On a sub-grid without the common layers (D&SP-cSub), tensors on the meta device stand for their
results.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gridformer import comm
from gridformer.comm import autograd
from gridformer.mesh import Axes, Axis
from gridformer.models import blocks
from gridformer.models.blocks.linear import linear
from gridformer.parallel.auto.products import blocks_of
from gridformer.parallel.tensor.summa.stationary import WeightParts


class GatheredRows(nn.Module):
    """The rows of a branch in D&SP: all-gathers x [b, s] of all g processes in order, [g b, s]."""

    def __init__(self, branch: Axis) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x_BS: Tensor) -> Tensor:
        return comm.all_gather(x_BS, self.branch, 0, "mask")


class GatheredMask(GatheredRows):
    """The attention mask of these rows, given valid [b, s]: [g b, 1, 1, s]."""

    def forward(self, valid_BS: Tensor) -> Tensor:
        return super().forward(valid_BS)[:, None, None, :]


class _CommonLinear(nn.Module):
    """A projection that all branches share, held by all sub-grids (D&SP) or the `first` (cSub)."""

    cast_parameters = ("weight", "bias")
    summed_parameters = ("weight",)

    def __init__(self, plain: blocks.Linear, axes: Axes, first: bool) -> None:
        super().__init__()
        self.branch, self.first = axes.branch, first
        self.device = torch.device(axes.device_type)
        self.n_out = plain.weight.shape[1]
        absent = first and self.branch.index > 0
        self.weight = None if absent else plain.weight
        self.bias = None if absent else plain.bias

    def project(self, x: Tensor) -> Tensor:
        """Returns the projection of x, a meta tensor where another sub-grid computes it."""
        if self.weight is None:
            return elsewhere(x, self.n_out)
        return linear(x, self.weight, self.bias)


class SliceLinear(_CommonLinear):
    """A common projection to q, k, v or all three, followed by SUPER's slice: its heads per branch.

    Maps x [b, s, h] to [g b, s, o/g] (D&SP: all-to-all in both directions) or to [b, s, o/g] (cSub:
    forward scatter, backward gather). o is the width of the projection: 3h for a fused QKV.
    """

    def forward(self, x: Tensor) -> Tensor:
        return sliced_for_branches(self.project(x), self.branch, self.first, self.device)


class SliceMerged(blocks.MergedParts):
    """A common merged projection, followed by SUPER's slice: the heads of each branch.

    Maps x [b, s, h] to outputs [g b, s, n/g] (D&SP: all-to-all in both directions) or [b, s, n/g]
    (cSub: forward scatter, backward gather) of the parts, n/g being more for heads that several
    branches read.
    """

    def __init__(self, plain: blocks.MergedLinear, axes: Axes, first: bool) -> None:
        super().__init__()
        self.branch, self.first = axes.branch, first
        self.device = torch.device(axes.device_type)
        self.names = plain.names
        widths = tuple(part.weight.shape[1] for part in plain.parts())
        within = tuple(blocks_of(part.pieces, self.branch.size) for part in plain.parts())
        self.columns = WeightParts(self.branch, widths, within)
        self.absent = first and self.branch.index > 0
        if not self.absent:
            for name in plain.names:
                self.add_module(name, getattr(plain, name))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        sliced = self.columns.local
        if self.absent:
            y = elsewhere(x, self.branch.size * sum(sliced))
        else:
            y = self.columns.by_rows(linear(x, *self.operands(x.dtype)))
        return sliced_for_branches(y, self.branch, self.first, self.device).split(sliced, -1)

    def cast_together(self) -> list[list[Tensor]]:
        return [] if self.absent else super().cast_together()


class ConcatLinear(_CommonLinear):
    """SUPER's concat, which joins the heads of all branches, followed by a common projection.

    Maps x [g b, s, i/g] (D&SP: all-to-all in both directions) or [b, s, i/g] (cSub: forward gather,
    backward scatter) to [b, s, h]. i is the width of all heads together.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            return self.project(autograd.gather_scatter(x, self.branch, -1, "concat"))
        return self.project(autograd.alltoall(x, self.branch, 0, -1, "concat"))


class NoEmbedding(nn.Module):
    """Stands for an embedding that another sub-grid computes: a meta tensor [b, s, h]."""

    weight = None

    def __init__(self, h: int) -> None:
        super().__init__()
        self.h = h

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return torch.empty(*tokens_BS.shape, self.h, device="meta", requires_grad=True)


class NoPositions(NoEmbedding):
    """Stands for position embeddings that another sub-grid computes: a meta tensor [s, h]."""

    def forward(  # type: ignore[override]
        self, s: int, start: int = 0, *_: Tensor | None
    ) -> Tensor:
        return torch.empty(s, self.h, device="meta")


class Elsewhere(nn.Module):
    """Stands for a head or loss of another sub-grid: a meta scalar to start the backward pass."""

    weight = None

    def forward(self, x: Tensor, *_: object) -> Tensor:
        return x.sum()


def sliced_for_branches(y: Tensor, branch: Axis, first: bool, device: torch.device) -> Tensor:
    """Sends each branch its slice of a projection y [b, s, o], whose columns lie side by side.

    The result is [g b, s, o/g] in D&SP, and [b, s, o/g] on `device` if only the `first` has y.
    """
    if first:
        return autograd.scatter_gather(y, branch, -1, device, "slice")
    return autograd.alltoall(y, branch, -1, 0, "slice")


def elsewhere(x: Tensor, width: int) -> Tensor:
    """Returns a meta tensor [.., width] that stands for a product of the meta tensor x."""
    return x[..., :1].expand(*x.shape[:-1], width)
