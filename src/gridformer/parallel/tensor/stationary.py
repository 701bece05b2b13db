"""Modules of Optimus with stationary weights; see `summa.stationary` for its products.

Between sections, activations [b, s, h] are sharded by tokens over columns (b, or s with
`sequence_parallel`) and by h over rows. Inside a section device (i, j) has all tokens of the
replica and block j r + i of the r c blocks of heads, columns of a feed-forward, or words. Vectors
and small tables that are read between sections are sharded over rows, and each column of devices
has a copy, which sees only its own tokens.

The products of BERT's and poolers' heads have no second product that brings tokens back to their
columns. Each column of devices computes these for its own tokens, with `in` sharded over rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gridformer import comm
from gridformer.mesh import Axes, Axis
from gridformer.models import Model, blocks
from gridformer.parallel.auto.cost import Choices
from gridformer.parallel.auto.products import blocks_over
from gridformer.parallel.scheme import BoundarySpec, ModuleTable
from gridformer.parallel.sharding import ParamPlacement, shard_parameter
from gridformer.parallel.tensor.branched import GatheredMask, GatheredRows
from gridformer.parallel.tensor.linear import (
    OUTPUT_STATIONARY,
    RowParallelLabelHead,
    kv_heads_of,
    merged_placements,
)
from gridformer.parallel.tensor.loss import VocabParallelCrossEntropy
from gridformer.parallel.tensor.norm import VECTOR_OVER_ROWS, GridNorm, shard_vectors
from gridformer.parallel.tensor.sequence import token_roles, tokens_of
from gridformer.parallel.tensor.summa import Replicated, Sharded, boundary_of
from gridformer.parallel.tensor.summa.stationary import (
    Ends,
    WeightParts,
    stationary_lookup,
    weight_stationary,
)

CLOSING = ParamPlacement(("col", "row"))
# Every row has the bias of its column, which the first one adds.
OPENING_BIAS = ParamPlacement(("col",), copies="row", partial=True)
SECTION = "section"  # the axis of the blocks of heads


class StationaryLinear(nn.Module):
    """y = x W + b with a weight that is not sent."""

    cast_parameters = ("weight", "bias")
    summed_parameters = ("weight",)

    def __init__(
        self,
        plain: blocks.Linear,
        ends: Callable[..., Ends],
        keep_input: bool,
        placements: tuple[ParamPlacement, ParamPlacement],
        axes: Axes,
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.keep_input = plain.weight, plain.bias, keep_input
        shard_parameter(self, "weight", placements[0], axes)
        if plain.bias is not None:
            shard_parameter(self, "bias", placements[1], axes)
        self.ends = ends(self.weight.shape[1])

    def forward(self, x: Tensor) -> Tensor:
        return weight_stationary(x, self.weight, self.bias, self.ends, self.keep_input)


class StationaryMergedLinear(blocks.MergedParts):
    """A merged product with a weight that is not sent; it opens its section."""

    def __init__(
        self, plain: blocks.MergedLinear, enter: Replicated, keep_input: bool, axes: Axes
    ) -> None:
        super().__init__()
        self.names, self.keep_input = plain.names, keep_input
        for name in plain.names:
            part = getattr(plain, name)
            weights, biases = merged_placements(part.pieces, OPENING_BIAS, axes, axes.col.name)
            shard_parameter(part, "weight", weights, axes)
            if part.bias is not None:
                shard_parameter(part, "bias", biases, axes)
            self.add_module(name, part)
        widths = tuple(part.weight.shape[1] for part in self.parts())
        within = [
            blocks_over(part.pieces, axes.col.size, axes.row.size)[1] for part in self.parts()
        ]
        self.ends = Ends(enter, Sharded(axes.row, -1), WeightParts(axes.row, widths, tuple(within)))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        weight, bias = self.operands(x.dtype)
        y = weight_stationary(x, weight, bias, self.ends, self.keep_input)
        assert self.ends.parts is not None
        return y.split(self.ends.parts.local, -1)


class StationaryTokenEmbedding(nn.Module):
    """Embeds tokens with a table [v, h], v over columns and h over rows, which is not sent.

    A column of devices looks up the words of its range for the tokens of all columns; `samples` is
    the axis over which their ids are gathered, if each column has its own samples.
    """

    cast_parameters = ("weight",)  # for the head

    def __init__(
        self,
        plain: blocks.TokenEmbedding,
        boundary: Replicated,
        samples: Axis,
        placement: ParamPlacement,
        axes: Axes,
    ) -> None:
        super().__init__()
        self.boundary, self.samples, self.weight = boundary, samples, plain.weight
        shard_parameter(self, "weight", placement, axes)
        self.first = axes.col.index * self.weight.shape[0]

    def forward(self, tokens_BS: Tensor) -> Tensor:
        tokens = comm.all_gather(tokens_BS, self.samples, 0, "tokens")
        return stationary_lookup(tokens, self.weight, self.first, self.boundary)


class StationaryTiedHead(nn.Module):
    """Logits [b, s, v/(rc)] of all samples, for a table that is not sent.

    An untied head has a table of its own, which lies as that of the embedding does.
    """

    def __init__(
        self,
        plain: blocks.TiedHead,
        ends: Callable[..., Ends],
        keep_input: bool,
        placement: ParamPlacement,
        axes: Axes,
    ) -> None:
        super().__init__()
        self.bias, self.keep_input = plain.bias, keep_input
        self.cast_parameters: tuple[str, ...] = ("bias",)
        if plain.bias is not None:
            shard_parameter(self, "bias", replace(OPENING_BIAS, pad=placement.pad[:1]), axes)
        if isinstance(plain, blocks.UntiedHead):
            self.cast_parameters = ("bias", "weight")
            self.weight = plain.weight
            shard_parameter(self, "weight", placement, axes)
        self.ends = ends

    def prepare(self, table_VH: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the table, as `blocks.TiedHead.prepare` does."""
        return table_VH

    def forward(
        self, x_BSH: Tensor, table_VH: Tensor, prepared: bool = False, padded: bool = False
    ) -> Tensor:
        """Computes logits; for the arguments see `blocks.TiedHead.forward`."""
        ends = self.ends(table_VH.shape[0])
        return weight_stationary(x_BSH, table_VH.t(), self.bias, ends, self.keep_input)


def stationary_table(model: Model, axes: Axes, choices: Choices, spec: BoundarySpec) -> ModuleTable:
    """Returns the replacements of a plain model's modules; `spec` is that of the scheme."""
    row, col, config = axes.row, axes.col, model.config
    by_sequence = spec.activation_layout == "s"
    tokens, width = boundary_of(spec, axes), Sharded(row, -1)
    samples = Axis("samples") if by_sequence else col
    block = col.index * row.size + row.index
    axes.further[SECTION] = Axis(SECTION, row.size * col.size, block)
    local = tokens_of(axes, by_sequence)
    multiple = row.size * col.size  # of a vocabulary, whose blocks are those of sections
    table = ParamPlacement(("col", "row"), pad=(multiple, 0))
    n_words = -(-config.vocab_size // multiple)
    here = Sharded(Axis("col"), 1)  # the tokens of this column alone

    def opens(n_columns: int) -> Ends:
        return Ends(tokens, width, WeightParts(row, (n_columns,), (row.size,)))

    def linear(plain: blocks.Linear | blocks.MergedLinear) -> nn.Module:
        keep = choices[plain.role.product].keep_input
        if isinstance(plain, blocks.MergedLinear):
            return StationaryMergedLinear(plain, tokens, keep, axes)
        if plain.role.opens:
            places = OUTPUT_STATIONARY, OPENING_BIAS
            return StationaryLinear(plain, opens, keep, places, axes)
        closes = Ends(width, tokens)
        places = CLOSING, VECTOR_OVER_ROWS
        return StationaryLinear(plain, lambda _: closes, keep, places, axes)

    def of_head(plain: blocks.Linear) -> nn.Module:
        # Every column has the chosen tokens if the sequence is sharded, so copies are equal.
        partial = plain.role.reads != "sequences" or not by_sequence
        bias = replace(VECTOR_OVER_ROWS, partial=partial)
        places = replace(bias, cut=("row", None)), bias
        alone = Ends(here, width)
        return StationaryLinear(plain, lambda _: alone, False, places, axes)

    def labels(partial: bool) -> Callable[[blocks.LabelHead], nn.Module]:
        placement = ParamPlacement(("row", None), copies="col", partial=partial)
        return lambda plain: RowParallelLabelHead(plain, axes, placement)

    def attention(plain: blocks.Attention | blocks.CrossAttention) -> None:
        plain.head_block = block
        if not by_sequence:
            plain.sample_block = col.index  # it gets the samples of all columns
        over = blocks_over(config.kv_heads, col.size, row.size)
        heads = config.n_heads, config.kv_heads
        plain.kv_heads = kv_heads_of(*heads, block, multiple, math.prod(over))

    def norm(plain: blocks.LayerNorm | blocks.RMSNorm) -> nn.Module | None:
        if row.size > 1:
            return GridNorm(plain, axes, VECTOR_OVER_ROWS)
        shard_vectors(plain, axes, VECTOR_OVER_ROWS)
        return None

    def positions(plain: blocks.PositionEmbedding | blocks.SegmentEmbedding) -> None:
        plain.part = local.part
        shard_parameter(plain, "weight", replace(VECTOR_OVER_ROWS, cut=(None, "row")), axes)

    def waves(plain: blocks.SinusoidalPositions) -> None:
        plain.part, plain.columns = local.part, (row.index, row.size)

    def head(plain: blocks.TiedHead) -> nn.Module:
        return StationaryTiedHead(plain, opens, choices["head"].keep_input, table, axes)

    def cross_entropy(plain: blocks.CrossEntropy) -> nn.Module:
        words = replace(axes.grid, index=block)
        return VocabParallelCrossEntropy(
            words, config.vocab_size, plain.smoothing, n_words, (row, col), samples
        )

    roles: dict[str, Any] = {
        "opening": linear,
        "closing": linear,
        "pooler": of_head,
        "transform": of_head,
        "attention": attention,
        "norm": norm,
        "head_norm": ParamPlacement((None,), copies="grid", partial=True),
        "token_embedding": lambda plain: StationaryTokenEmbedding(
            plain, tokens, samples, table, axes
        ),
        "positions": positions,
        "segments": positions,
        "sinusoidal_positions": waves,
        "relative_bias": ParamPlacement((None, SECTION)),
        "tied_head": head,
        "label_head": labels(not by_sequence),
        "token_head": labels(True),
        "cross_entropy": cross_entropy,
        **token_roles(axes, local, row.index, row.index),
    }
    if not by_sequence:
        roles |= {
            "padding_mask": lambda plain: GatheredMask(col),
            "attending_rows": lambda plain: GatheredRows(col),
        }
    return ModuleTable(roles)
