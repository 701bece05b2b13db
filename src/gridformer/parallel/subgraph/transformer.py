"""SUPER: transformers under sub-graph parallelism (Jain et al. 2021; specification, section 4).

Heads, and slices of the feed-forward, are branches: g sub-grids hold 1/g of them each, for the
samples of all. A branch section is entered and left by segmented collectives among the g processes
that have the same place in their sub-grids:

    D&SP        common layers on all processes, samples cut     all-gather, reduce-scatter of b
    D&SP-cSub   common layers on the first sub-grid alone       broadcast, reduce

So this is Megatron's cut of the weights with another boundary (gridformer.parallel.boundary). With
the projections outside the branches (`attention: outside`) what enters are slices of q, k and v and
what leaves are the heads' results: all-to-all both ways, or scatter and gather.

On the other sub-grids of D&SP-cSub the common layers do not exist. What lies between sections is
there a tensor on the meta device, which has a shape, takes part in autograd and costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gridformer import comm
from gridformer.comm import Axes, Axis, autograd
from gridformer.config import LayoutConfig
from gridformer.models import Model, blocks
from gridformer.models.blocks.linear import linear
from gridformer.parallel.boundary import Boundary, OnFirst, Sharded
from gridformer.parallel.choices import Choices
from gridformer.parallel.grid import GridLinear, Schedules
from gridformer.parallel.partitioned import PartitionedFromFirst
from gridformer.parallel.placement import Placement, place

BRANCH_BIAS = Placement(cut=("col",))
BRANCH_HEADS = Placement(cut=(None, "col"))


def apply(model: Model, axes: Axes, choices: Choices, layout: LayoutConfig) -> None:
    """Put a plain model's branches on sub-grids and its common layers where they belong."""
    branch = axes.branch
    first = layout.common == "first"
    if branch.size == 1:
        return
    boundary: Boundary = (
        OnFirst(branch, torch.device(axes.device_type)) if first else Sharded(branch, dim=0)
    )
    schedules = Schedules(replace(axes, col=branch), boundary)  # the grid of one row: g columns
    absent = first and branch.index > 0
    if first:
        model.recompute.partition = PartitionedFromFirst(branch, torch.device(axes.device_type))
        # The first computes again until its last product, or to the end: the others go as far.
        post = model.config.norm_position == "post"
        model.recompute.stops_early = not absent or not (post or layout.feed_forward == "common")
    width = model.config.hidden_size
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            match child:
                case blocks.Linear() if not choices[child.role.product].common:
                    bias = BRANCH_BIAS if child.role.opens else _common(1, first)
                    if absent and not child.role.opens:
                        child.bias = None  # added where the sum arrives
                    choice = choices[child.role.product]
                    setattr(module, name, GridLinear(child, choice, bias, schedules))
                case blocks.Linear() if child.role.section == "attention":
                    cut = SliceLinear if child.role.opens else ConcatLinear
                    setattr(module, name, cut(child, axes, first))
                case blocks.Linear() if absent:  # of a head; those of a feed-forward go with it
                    setattr(module, name, nn.Identity())
                case blocks.Attention() | blocks.CrossAttention():
                    child.head_block = branch.index
                    if not first:
                        child.clock = GatheredClock(model.clock, branch)
                case blocks.RelativeBias():
                    place(child, "weight", BRANCH_HEADS, schedules.axes)
                case blocks.PaddingMask() if not first:
                    setattr(module, name, GatheredMask(branch))
                case blocks.FeedForward() if absent and choices[child.up.role.product].common:
                    setattr(module, name, nn.Identity())
                case blocks.LayerNorm() | blocks.RMSNorm() | blocks.Dropout() if absent:
                    setattr(module, name, nn.Identity())
                case blocks.TokenEmbedding() | blocks.SegmentEmbedding() if absent:
                    setattr(module, name, NoEmbedding(width))
                case blocks.PositionEmbedding() | blocks.SinusoidalPositions() if absent:
                    setattr(module, name, NoPositions(width))
                case (
                    blocks.TiedHead()
                    | blocks.CrossEntropy()
                    | blocks.LabelLoss()
                    | blocks.Classifier()
                ) if absent:
                    setattr(module, name, Elsewhere())
    if not absent:
        _place_common(model, axes, first)


def _place_common(model: nn.Module, axes: Axes, first: bool) -> None:
    """Every parameter that no module above has placed is common."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not hasattr(parameter, "shard"):
                place(module, name, _common(parameter.dim(), first), axes)


def _common(dims: int, first: bool) -> Placement:
    return Placement(cut=(None,) * dims, replicas="dp" if first else "every")


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
