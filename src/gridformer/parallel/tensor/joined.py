"""Joined products and grouped attention on the columns of a grid, or on branches.

Every part of a joined product (gridformer.models.blocks.joined) is sharded over columns by itself,
so that a column of devices has the same heads of q, k and v. Its parts then lie side by side, and
for the products of a grid they are one weight: its input is gathered once, and one message carries
all parts down a column.

Heads of keys and values that do not divide over c columns are replicated. With g = gcd(m, c), the
columns fall into g blocks of c/g adjacent ones, and each column of a block holds the same m/g
heads, which are all that the queries of the block read. One of the copies owns the parameters, and
gradients of the others are partial sums: each column has those of its own queries.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from gridformer.config import ModelConfig
from gridformer.mesh import Axes, Axis
from gridformer.models import blocks
from gridformer.models.blocks.linear import MergedPart, linear, side_by_side
from gridformer.parallel.auto.cost import Choice
from gridformer.parallel.auto.products import blocks_of
from gridformer.parallel.axes import replicated
from gridformer.parallel.data.fsdp import materialized
from gridformer.parallel.sharding import ParamPlacement, shard_parameter
from gridformer.parallel.tensor import summa
from gridformer.parallel.tensor.branched import elsewhere, sliced_for_branches
from gridformer.parallel.tensor.linear import (
    OUTPUT_STAYS,
    GridLinear,
    Schedules,
    keep_gathered_of,
)


class GridJoinedLinear(blocks.MergedParts):
    """A joined product, x [.., in/c] to an output [.., n/c] for each part; its output stays.

    Args:
        plain: The module to replace; its parameters are sharded.
        choice: By which schedule operands travel.
        bias: Placement of biases of parts that divide over columns.
        schedules: The schedules of the model.
        over: The axis that is `col` among the axes of the schedules.
    """

    def __init__(
        self,
        plain: blocks.MergedLinear,
        choice: Choice,
        bias: ParamPlacement,
        schedules: Schedules,
        over: str = "col",
    ) -> None:
        super().__init__()
        assert choice.stays == "output", "columns of all parts lie side by side on one device"
        self.names = plain.names
        self.schedule, self.keep = schedules[choice], keep_gathered_of(choice)
        axes = schedules.axes
        for name in plain.names:
            part: MergedPart = getattr(plain, name)
            weights, biases = _placements(part, bias, axes, over)
            shard_parameter(part, "weight", weights, axes)
            if part.bias is not None:
                shard_parameter(part, "bias", biases, axes)
            self.add_module(name, part)
        if self.keep.weight is not None:
            self.keep.weight.source = self._source
            schedules.chain(self.keep.weight)

    def _source(self) -> tuple[Tensor, summa.Schedule]:
        weights = [materialized(part.weight) for part in self.parts()]
        return side_by_side(weights, weights[0].dtype), self.schedule

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        weight, bias = self.operands(x.dtype)
        return self.split(summa.product_ab(x, weight, self.schedule, bias, self.keep))


def grid_product(
    plain: blocks.Linear | blocks.MergedLinear,
    choice: Choice,
    bias: ParamPlacement,
    schedules: Schedules,
    over: str = "col",
) -> nn.Module:
    """Returns the form of a product on a grid.

    Args:
        plain: The module to replace; its parameters are sharded.
        choice: By which schedule operands travel.
        bias: Placement of biases that divide over columns.
        schedules: The schedules of the model.
        over: The axis that is `col` among the axes of the schedules; only joined products read it.

    Returns:
        A `GridJoinedLinear` for a joined product, and a `GridLinear` for a single one.
    """
    if isinstance(plain, blocks.MergedLinear):
        return GridJoinedLinear(plain, choice, bias, schedules, over)
    return GridLinear(plain, choice, bias, schedules)


def _placements(
    part: MergedPart, bias: ParamPlacement, axes: Axes, over: str
) -> tuple[ParamPlacement, ParamPlacement]:
    """Returns how the weight and the bias of a part are sharded.

    Args:
        part: The part.
        bias: Placement of a bias that divides over columns.
        axes: Axes of the grid.
        over: The axis that is `col` among them.
    """
    names = replicated(axes, part.pieces, over)
    if names is None:
        return OUTPUT_STAYS, bias
    weights = ParamPlacement(("row", names.block), copies=names.copy, partial=True)
    # Biases of other parts are copied over rows, too.
    copies = names.row_copy if bias.copies == "row" else names.copy
    return weights, replace(bias, cut=(names.block,), copies=copies, partial=True)


def shard_heads(attention: nn.Module, model: ModelConfig, axis: Axis) -> None:
    """Tells an attention module which heads this device has.

    Args:
        attention: The module.
        model: The model.
        axis: The axis over which heads are sharded.
    """
    attention.head_block = axis.index  # type: ignore[assignment]
    if isinstance(attention, blocks.GroupedAttention):
        read = kv_heads_of(model.n_heads, model.kv_heads, axis.index, axis.size)
        attention.kv_heads = read


def kv_heads_of(heads: int, kv_heads: int, index: int, columns: int) -> tuple[int, ...] | None:
    """Returns which of a column's heads of keys each of its heads of queries reads.

    None means that equally many queries in a row read each of them.

    Args:
        heads: Heads of queries of the model.
        kv_heads: Heads of keys and values of the model, which divide `heads`.
        index: The column.
        columns: The number of columns, which divides `heads`.
    """
    mine, n_blocks = heads // columns, blocks_of(kv_heads, columns)
    held = kv_heads // n_blocks
    first = index // (columns // n_blocks) * held
    read = tuple((index * mine + i) // (heads // kv_heads) - first for i in range(mine))
    even = mine % held == 0 and read == tuple(i // (mine // held) for i in range(mine))
    return None if even else read


class SliceJoined(blocks.MergedParts):
    """A common joined projection, followed by SUPER's slice: the heads of each branch.

    Maps x [b, s, h] to outputs [g b, s, n/g] (D&SP: all-to-all in both directions) or [b, s, n/g]
    (cSub: forward scatter, backward gather) of the parts, n/g being more for heads that several
    branches read.

    Args:
        plain: The projection.
        axes: Axes with `branch`, which has g ranks.
        first: Whether only the first sub-grid holds the projection (cSub).
    """

    def __init__(self, plain: blocks.MergedLinear, axes: Axes, first: bool) -> None:
        super().__init__()
        self.branch, self.first = axes.branch, first
        self.device = torch.device(axes.device_type)
        g = self.branch.size
        self.names = plain.names
        self.blocks = [blocks_of(part.pieces, g) for part in plain.parts()]
        self.widths = [part.weight.shape[1] for part in plain.parts()]
        self.absent = first and self.branch.index > 0
        if not self.absent:
            for name in plain.names:
                self.add_module(name, getattr(plain, name))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        sliced = [width // n for width, n in zip(self.widths, self.blocks)]
        if self.absent:
            y = elsewhere(x, self.branch.size * sum(sliced))
        else:
            y = self._for_branches(linear(x, *self.operands(x.dtype)))
        return sliced_for_branches(y, self.branch, self.first, self.device).split(sliced, -1)

    def cast_together(self) -> list[list[Tensor]]:
        return [] if self.absent else super().cast_together()

    def _for_branches(self, out: Tensor) -> Tensor:
        """Puts the columns of each branch next to each other: [b, s, g times their number]."""
        g = self.branch.size
        found = []
        for part, n in zip(self.split(out), self.blocks):
            each = part.unflatten(-1, (n, -1))
            found.append(each if n == g else each.repeat_interleave(g // n, -2))
        return torch.cat(found, -1).flatten(-2)
