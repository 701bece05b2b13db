"""Linear layers, embeddings and heads of all schemes on a device grid; Megatron's grid has one row.

Each module here replaces the plain module it is named after, with the same parameter names and
local blocks of the parameters. Where the blocks lie depends on which operand of the product stays
in place (gridformer.parallel.auto.cost):

    output stationary    W [in, out]: in over rows, out over columns    C = A B, B = W
    input stationary     W [in, out]: in over columns, out over rows    C = A Bᵀ, B = Wᵀ

Every part of a merged product is sharded over columns by itself, so that a column of devices has
the same heads of q, k and v. Heads of keys and values that do not divide over c columns are
replicated. With g = gcd(m, c), the columns fall into g blocks of c/g adjacent ones, and each column
of a block holds the same m/g heads, which are all that the queries of the block read. One of the
copies owns the parameters, and gradients of the others are partial sums: each column has those of
its own queries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gridformer.comm import autograd
from gridformer.config import ModelConfig
from gridformer.mesh import Axes, Axis
from gridformer.models import Model, blocks
from gridformer.models.blocks.cast import transposed
from gridformer.models.blocks.linear import MergedPart, linear, side_by_side
from gridformer.parallel.auto.cost import Choice, Choices
from gridformer.parallel.auto.products import blocks_of
from gridformer.parallel.axes import replicated
from gridformer.parallel.data.fsdp import materialized
from gridformer.parallel.sharding import (
    ParamPlacement,
    shard_parameter,
    vocabulary_multiple,
    vocabulary_width,
)
from gridformer.parallel.tensor import summa
from gridformer.parallel.tensor.loss import VocabParallelCrossEntropy
from gridformer.parallel.tensor.norm import grid_rms_norm, line_of

OUTPUT_STATIONARY = ParamPlacement(cut=("row", "col"))
INPUT_STATIONARY = ParamPlacement(cut=("col", "row"), transposed=True)  # B is read row by row


class Schedules:
    """The schedules of a model: one object for each kind, so that products share its workspace.

    Args:
        axes: Axes of the grid.
        boundary: How activations are sharded between sections.
        feed_forward: How feed-forward sections gather them; None for the same way.
        late: Whether gradients of weights are multiplied late, see `GatheredWeight`.
    """

    def __init__(
        self,
        axes: Axes,
        boundary: summa.Replicated,
        feed_forward: summa.Replicated | None = None,
        late: bool = False,
    ) -> None:
        self.axes, self.boundary, self.feed_forward = axes, boundary, feed_forward or boundary
        self.late = late
        self._made: dict[tuple[str, int, bool, bool], summa.Schedule] = {}
        self._last: summa.GatheredWeight | None = None

    def __getitem__(self, choice: Choice) -> summa.Schedule:
        """Returns the schedule that `choice` names, created on first use."""
        inside = choice.product.section == "feed_forward" and self.feed_forward != self.boundary
        key = choice.schedule, choice.n_chunks, choice.whole_backward, inside
        if key not in self._made:
            match choice.schedule:
                case "broadcast":
                    self._made[key] = summa.Broadcast(self.axes)
                case "pipelined":
                    self._made[key] = summa.Pipelined(self.axes)
                case "gather":
                    boundary = self.feed_forward if inside else self.boundary
                    self._made[key] = summa.Gathered(self.axes, boundary, *key[1:3])
        return self._made[key]

    def gathered_weight(self, choice: Choice) -> summa.GatheredWeight | None:
        """Returns what a product gathers of its weight ahead, or does late; None if nothing."""
        late = self.late and choice.product.section != "head"
        if choice.schedule != "gather" or (self.axes.row.size == 1 and not late):
            return None
        return summa.GatheredWeight(self.axes.row, choice.keep_weight, late)

    def chain(
        self,
        weight: summa.GatheredWeight | None,
        block: Callable[[], Tensor],
        ends_block: bool = False,
        parameters: Callable[[], Sequence[Tensor]] | None = None,
        turned: bool = False,
    ) -> None:
        """Links the weight of a product to that of the previous product, which prefetches it.

        Modules are built in forward order. `block` returns the local block of the weight. For the
        others see `GatheredWeight`.
        """
        if weight is None:
            return
        weight.block, weight.ends_block = block, ends_block
        weight.parameters, weight.turned = parameters, turned
        if self._last is not None:
            self._last.after, weight.before = weight, self._last
        self._last = weight


def grid_product(
    plain: blocks.Linear | blocks.MergedLinear,
    choice: Choice,
    bias: ParamPlacement,
    schedules: Schedules,
) -> nn.Module:
    """Returns the form of a single or merged product on a grid, whose parameters are sharded.

    `bias` is the placement of biases that divide over columns.
    """
    kind = GridMergedLinear if isinstance(plain, blocks.MergedLinear) else GridLinear
    return kind(plain, choice, bias, schedules)  # type: ignore[arg-type]


def grid_roles(
    model: Model, axes: Axes, choices: Choices, schedules: Schedules
) -> dict[str, Callable[[Any], nn.Module | None]]:
    """Returns what schemes on a grid make of attention, the embedding, heads and the loss."""
    head, table = choices["head"], schedules.gathered_weight(choices["head"])
    vocab_size, col = model.config.vocab_size, axes.col
    return {
        "attention": lambda plain: shard_heads(plain, model.config, axes, "col"),
        "token_embedding": lambda plain: GridTokenEmbedding(plain, head, table, schedules),
        "tied_head": lambda plain: GridTiedHead(plain, head, table, schedules),
        "label_head": lambda plain: RowParallelLabelHead(plain, axes),
        "cross_entropy": lambda plain: VocabParallelCrossEntropy(
            col, vocab_size, plain.smoothing, vocabulary_width(axes, vocab_size)
        ),
    }


class GridLinear(nn.Module):
    """y = x W + b, with x [.., in/c], y [.., out/c] and b [out/c].

    W is [in/r, out/c] if the output stays (Optimus, Algorithm 1), and [in/c, out/r] if the input
    stays (Algorithm 2 with B = Wᵀ).
    """

    cast_parameters = ("weight", "bias")
    summed_parameters = ("weight",)

    def __init__(
        self, plain: blocks.Linear, choice: Choice, bias: ParamPlacement, schedules: Schedules
    ) -> None:
        super().__init__()
        self.output_stationary = choice.stationary == "output"
        self.schedule, self.keep_input = schedules[choice], choice.keep_input
        self.gathered_weight = schedules.gathered_weight(choice)
        self.ends_block = plain.role.section == "feed_forward" and not plain.role.opens
        self.weight, self.bias = plain.weight, plain.bias
        placement = OUTPUT_STATIONARY if self.output_stationary else INPUT_STATIONARY
        shard_parameter(self, "weight", placement, schedules.axes)
        if plain.bias is not None:
            shard_parameter(self, "bias", bias, schedules.axes)
        # A chunked loss runs products of the head again and again, and their backward passes.
        once = None if plain.role.section == "head" else lambda: (self.weight,)
        turned = not self.output_stationary
        schedules.chain(self.gathered_weight, self._block, self.ends_block, once, turned)

    def _block(self) -> Tensor:
        weight = materialized(self.weight)  # its layer may not have been reached yet
        return weight if self.output_stationary else transposed(weight)

    def forward(self, x: Tensor) -> Tensor:
        weight, schedule, bias, ahead = self.weight, self.schedule, self.bias, self.gathered_weight
        if self.output_stationary:
            return summa.product_ab(
                x, weight, schedule, bias, ahead, self.keep_input, ends_block=self.ends_block
            )
        in_memory = weight.untyped_storage().nbytes() > 0  # FSDP may have gathered copies alone
        turned = weight.t() if in_memory else transposed(weight)
        return summa.product_abt(x, turned, schedule, bias, ahead, self.ends_block)


class GridMergedLinear(blocks.MergedParts):
    """A merged product, x [.., in/c] to an output [.., n/c] for each part; its output stays."""

    def __init__(
        self, plain: blocks.MergedLinear, choice: Choice, bias: ParamPlacement, schedules: Schedules
    ) -> None:
        super().__init__()
        assert choice.stationary == "output", "columns of all parts lie side by side on one device"
        self.names = plain.names
        self.schedule, self.keep_input = schedules[choice], choice.keep_input
        self.gathered_weight = schedules.gathered_weight(choice)
        axes = schedules.axes
        for name in plain.names:
            part: MergedPart = getattr(plain, name)
            over = schedules.boundary.col.name
            weights, biases = merged_placements(part.pieces, bias, axes, over)
            shard_parameter(part, "weight", weights, axes)
            if part.bias is not None:
                shard_parameter(part, "bias", biases, axes)
            self.add_module(name, part)
        schedules.chain(self.gathered_weight, self._block, parameters=self._weights)

    def _weights(self) -> list[Tensor]:
        return [part.weight for part in self.parts()]

    def _block(self) -> Tensor:
        weights = [materialized(part.weight) for part in self.parts()]
        return side_by_side(weights, weights[0].dtype)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        weight, bias = self.operands(x.dtype)
        ahead, keep_input = self.gathered_weight, self.keep_input
        return self.split(summa.product_ab(x, weight, self.schedule, bias, ahead, keep_input))


def merged_placements(
    pieces: int, bias: ParamPlacement, axes: Axes, over: str
) -> tuple[ParamPlacement, ParamPlacement]:
    """Returns how the weight of a part is sharded, and its bias, given that of other parts.

    `pieces` are those of the part, and `over` is the axis of the columns.
    """
    names = replicated(axes, pieces, over)
    if names is None:
        return OUTPUT_STATIONARY, bias
    weights = ParamPlacement(("row", names.block), copies=names.copy, partial=True)
    # Biases of other parts are copied over rows, too.
    copies = names.row_copy if bias.copies == "row" else names.copy
    return weights, replace(bias, cut=(names.block,), copies=copies, partial=True)


def shard_heads(
    attention: blocks.Attention | blocks.CrossAttention, model: ModelConfig, axes: Axes, over: str
) -> None:
    """Tells an attention module which of the heads, sharded over an axis, this device has."""
    axis = axes[over]
    attention.head_block = axis.index
    for pieces, name in ((0, "q_norm"), (model.kv_heads, "k_norm")):
        norm = getattr(attention, name, None)
        if isinstance(norm, blocks.AllHeadsNorm):
            vector = ParamPlacement((over,), copies="row" if over == "col" else None, partial=True)
            _, placement = merged_placements(pieces, vector, axes, over)
            shard_parameter(norm, "weight", placement, axes)
            # Copies of heads count as often in the sums as in the width.
            norm.over, norm.line = grid_rms_norm, (line_of(axis),)
    attention.kv_heads = kv_heads_of(model.n_heads, model.kv_heads, axis.index, axis.size)


def kv_heads_of(
    heads: int, kv_heads: int, index: int, columns: int, n_blocks: int = 0
) -> tuple[int, ...] | None:
    """Returns which of a column's heads of keys each of its heads of queries reads.

    None means that equally many queries in a row read each of them. The model's heads of keys, and
    the number of columns, divide its heads of queries. `n_blocks` is the number of blocks of
    columns with different heads of keys, if it is not `blocks_of`.
    """
    mine, n_blocks = heads // columns, n_blocks or blocks_of(kv_heads, columns)
    held = kv_heads // n_blocks
    first = index // (columns // n_blocks) * held
    read = tuple((index * mine + i) // (heads // kv_heads) - first for i in range(mine))
    even = mine % held == 0 and read == tuple(i // (mine // held) for i in range(mine))
    return None if even else read


class GridTokenEmbedding(nn.Module):
    """Embeds tokens [b/r, s], equal along a row of devices, with a table [v, h]: [b/r, s, h/c].

    The tied head reads the same table, so the head's choice decides where it lies:

    - The head's output stays: v over columns, h over rows. Each column of devices looks up the
      tokens of its range, and the partial sums are reduced.
    - The head's input stays (as in the paper): v over rows, h over columns.
    """

    cast_parameters = ("weight",)  # for the head

    def __init__(
        self,
        plain: blocks.TokenEmbedding,
        head: Choice,
        table: summa.GatheredWeight | None,
        schedules: Schedules,
    ) -> None:
        super().__init__()
        self.axes = axes = schedules.axes
        self.schedule, self.gathered_weight = schedules[head], table
        self.head_output_stationary = head.stationary == "output"
        self.cast_multiple = _cast_multiple(plain, self.head_output_stationary, self.schedule)
        self.weight = plain.weight
        shard_parameter(self, "weight", table_placement(self.head_output_stationary, axes), axes)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        table = self.weight.t() if self.head_output_stationary else self.weight
        output_stationary = not self.head_output_stationary
        return summa.lookup(
            tokens_BS, table, self.schedule, self.axes, output_stationary, self.gathered_weight
        )


def table_placement(output_stationary: bool, axes: Axes) -> ParamPlacement:
    """Returns where a table [v, h] lies that a head reads, whose output stays or its input."""
    cut = ("col", "row") if output_stationary else ("row", "col")
    # Only v is padded to this multiple. h is sharded over the other axis alone, so on a grid of one
    # row it may be whole and need not be divisible by the columns.
    return ParamPlacement(cut=cut, pad=(vocabulary_multiple(axes), 0))


def _cast_multiple(
    plain: blocks.TokenEmbedding | blocks.TiedHead,
    output_stationary: bool,
    schedule: summa.Schedule,
) -> int:
    """Returns the multiple of rows that the cast copy of a head's table has."""
    whole = output_stationary and isinstance(schedule, summa.Gathered)
    return plain.cast_multiple if whole else 1


class GridTiedHead(nn.Module):
    """Logits [b/r, s, v/c] = x Tᵀ for x [b/r, s, h/c] and the table T of the token embedding.

    A bias [v] is sharded over columns, as the logits are, and each row of devices holds a copy. An
    untied head has a table of its own, which lies as that of the embedding does.
    """

    cast_parameters: tuple[str, ...] = ("bias",)
    cast_multiple = 1

    def __init__(
        self,
        plain: blocks.TiedHead,
        choice: Choice,
        table: summa.GatheredWeight | None,
        schedules: Schedules,
    ) -> None:
        super().__init__()
        self.output_stationary = choice.stationary == "output"
        self.schedule, self.gathered_weight = schedules[choice], table
        self.keep_input = choice.keep_input
        self.bias = plain.bias
        axes = schedules.axes
        self.of_column = self.schedule  # multiplies a table from `prepare`
        if isinstance(self.schedule, summa.Gathered):
            self.of_column = summa.Gathered(replace(axes, row=Axis("row")), self.schedule.boundary)
        if plain.bias is not None:
            pad = (vocabulary_multiple(axes),)
            placement = ParamPlacement(("col",), copies="row", partial=True, pad=pad)
            shard_parameter(self, "bias", placement, axes)
        if isinstance(plain, blocks.UntiedHead):
            self.gathered_weight = schedules.gathered_weight(choice)
            self.cast_parameters = ("bias", "weight")
            self.cast_multiple = _cast_multiple(plain, self.output_stationary, self.schedule)
            self.weight = plain.weight
            shard_parameter(self, "weight", table_placement(self.output_stationary, axes), axes)

    def prepare(self, table_VH: Tensor, dtype: torch.dtype) -> Tensor:
        """Gathers the part of the table that this column of devices reads, for several products.

        Forward all-gather down the column, backward reduce-scatter. Schedules that work panel by
        panel never gather the table: they return it as it is and send it again in each product.

        Returns:
            [V/c, h] if the output stays and [V, h/c] otherwise, V being the padded vocabulary.
        """
        if not isinstance(self.schedule, summa.Gathered) or self.schedule.row.size == 1:
            return table_VH
        output = self.output_stationary
        block = table_VH.t() if output else table_VH
        column = summa.whole_column(block, dtype, self.schedule, self.gathered_weight, output)
        return column.t() if output else column

    def forward(
        self, x_BSH: Tensor, table_VH: Tensor, prepared: bool = False, padded: bool = False
    ) -> Tensor:
        """Returns logits [b/r, s, v/c]; `padded` allows more columns, which a loss leaves out.

        `table_VH` is the local block of the embedding's table, or comes from `prepare`.
        """
        schedule, ahead = self.schedule, self.gathered_weight
        if prepared:
            schedule, ahead = self.of_column, None
        if self.output_stationary:
            # The backward pass of a chunk of a loss follows at once, so its input is kept.
            keep_input = self.keep_input or prepared
            table_HV = table_VH.t()
            return summa.product_ab(x_BSH, table_HV, schedule, self.bias, ahead, keep_input, padded)
        return summa.product_abt(x_BSH, table_VH, schedule, self.bias, ahead)


class RowParallelLabelHead(nn.Module):
    """Logits [b, n_labels] = x W + b for x [b, h/c] and W [h/c, n_labels].

    Forward all-reduce of partial sums over columns, backward identity. Only column 0 has the bias
    and adds it to its partial sum. Each row of devices holds a copy. With another `placement`, the
    axis that shards W takes the place of the columns.
    """

    cast_parameters = ("weight",)

    def __init__(
        self,
        plain: blocks.LabelHead,
        axes: Axes,
        placement: ParamPlacement | None = None,
    ) -> None:
        super().__init__()
        placement = placement or ParamPlacement(("col", None), copies="row", partial=True)
        self.axis, self.weight = axes[str(placement.cut[0])], plain.weight
        self.bias = None if self.axis.index else plain.bias
        shard_parameter(self, "weight", placement, axes)
        if self.bias is not None:
            shard_parameter(self, "bias", replace(placement, cut=(None,)), axes)

    def forward(self, x_BH: Tensor) -> Tensor:
        terms = linear(x_BH, self.weight, None)
        if self.bias is not None:
            terms = terms + self.bias.to(terms.dtype)
        return autograd.allreduce_identity(terms, self.axis)
