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


class GatheredMask(nn.Module):
    """Attention mask of a branch in D&SP, for the samples of all g processes in order.

    All-gathers valid [b, s] over `branch`: [g b, 1, 1, s].
    """

    def __init__(self, branch: Axis) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, valid_BS: Tensor) -> Tensor:
        return comm.all_gather(valid_BS, self.branch, 0, "mask")[:, None, None, :]


class GatheredRows(nn.Module):
    """The rows of a branch in D&SP: all-gathers x [b, s] over `branch`, [g b, s]."""

    def __init__(self, branch: Axis) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x_BS: Tensor) -> Tensor:
        return comm.all_gather(x_BS, self.branch, 0, "mask")


class _CommonLinear(nn.Module):
    """A projection that all branches share, held by all sub-grids (D&SP) or by the first (cSub).

    Args:
        plain: The projection.
        axes: Axes with `branch`, which has g ranks.
        first: Whether only the first sub-grid holds the projection (cSub).
    """

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


class ConcatLinear(_CommonLinear):
    """SUPER's concat, which joins the heads of all branches, followed by a common projection.

    Maps x [g b, s, i/g] (D&SP: all-to-all in both directions) or [b, s, i/g] (cSub: forward gather,
    backward scatter) to [b, s, h]. i is the width of all heads together.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.first:
            x = autograd.alltoall(x, self.branch, 0, -1, "concat")
        else:
            x = autograd.gather_scatter(x, self.branch, -1, "concat")
        return self.project(x)


class NoEmbedding(nn.Module):
    """Stands for an embedding that another sub-grid computes: a meta tensor [b, s, h]."""

    weight = None

    def __init__(self, h: int) -> None:
        super().__init__()
        self.h = h

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return torch.empty(*tokens_BS.shape, self.h, device="meta", requires_grad=True)


class NoPositions(nn.Module):
    """Stands for position embeddings that another sub-grid computes: a meta tensor [s, h]."""

    def __init__(self, h: int) -> None:
        super().__init__()
        self.h = h

    def forward(self, s: int, start: int = 0, *_: Tensor | None) -> Tensor:
        return torch.empty(s, self.h, device="meta")


class Elsewhere(nn.Module):
    """Stands for a head or loss of another sub-grid: a meta scalar to start the backward pass."""

    weight = None

    def forward(self, x: Tensor, *_: object) -> Tensor:
        return x.sum()


def sliced_for_branches(y: Tensor, branch: Axis, first: bool, device: torch.device) -> Tensor:
    """Sends each branch its slice of columns; for what it returns see `SliceLinear`.

    Args:
        y: A projection [b, s, o], with the columns of each branch next to each other.
        branch: The axis of branches.
        first: Whether only the first sub-grid holds it (cSub).
        device: The device of the slices.
    """
    if first:
        return autograd.scatter_gather(y, branch, -1, device, "slice")
    return autograd.alltoall(y, branch, -1, 0, "slice")


def elsewhere(x: Tensor, width: int) -> Tensor:
    """Returns a meta tensor [.., width] that stands for a product of the meta tensor x."""
    return x[..., :1].expand(*x.shape[:-1], width)
