"""Optimus: two-dimensional tensor parallelism on an r x c grid.

Xu, Li, Gong, You 2021, "An Efficient 2D Method for Training Super-Large Deep Learning Models".
Activations [b, s, h] are sharded b over rows and h over columns; weights are sharded over both.
Every product is a SUMMA product (Algorithms 1 to 3, gridformer.parallel.tensor.summa). Attention is
local, because a device holds n/c heads of b/r whole sequences. A norm sums its statistics along a
row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gridformer.config import LayoutConfig, RunConfig, divisors
from gridformer.parallel.auto.cost import Choices, Stays
from gridformer.parallel.auto.products import Product
from gridformer.parallel.fixes import Changes
from gridformer.parallel.scheme import (
    HEADS_WIDTH,
    BoundarySpec,
    Cuts,
    LayoutAxis,
    ModuleTable,
    SchemeSpec,
)

if TYPE_CHECKING:
    from torch import nn

    from gridformer.mesh import Axes
    from gridformer.models import Model, blocks


class Optimus(SchemeSpec):
    """The spec of Optimus on any r x c grid; the paper's grids are square."""

    name = "optimus"
    axes = ("rows", "cols")
    keys = ("schedule", "stationary")

    def boundary(self, layout: LayoutConfig) -> BoundarySpec:
        return BoundarySpec("col", "h")

    def samples_over(self, layout: LayoutConfig) -> LayoutAxis | None:
        return "rows"

    def cuts(self, run: RunConfig) -> Cuts:
        model = run.model
        both = {"model.ffn_size": model.ffn_size, "model.hidden_size": model.hidden_size}
        heads = {HEADS_WIDTH: model.n_heads * model.head_width} if model.head_dim else {}
        return {"rows": both | heads, "cols": {"model.n_heads": model.n_heads} | both}

    def gathers(self, layout: LayoutConfig) -> tuple[str, ...]:
        if layout.schedule in ("auto", "gather"):
            return ("none", "inputs", "weights", "all")
        return ("none",)

    def arrangements(self, devices: int) -> Iterator[dict[str, Any]]:
        if devices > 1:
            for rows in divisors(devices):
                yield {"rows": rows, "cols": devices // rows}

    def stays(self, product: Product, layout: LayoutConfig) -> Stays:
        """Returns which activation stays: by default the wider one.

        If both are equally wide, sections are entered and left as in other schemes.
        """
        if product.parts:  # columns of all its parts lie side by side on one device
            return "output"
        if layout.stationary != "auto":
            return layout.stationary
        if product.n_in != product.n_out:
            return "input" if product.n_in > product.n_out else "output"
        return super().stays(product, layout)

    def savings(self, layout: LayoutConfig) -> tuple[list[Changes], list[Changes]]:
        if layout.schedule == "pipelined":
            return [], []
        return [], [{"layout.schedule": "pipelined"}]

    def table(
        self, model: Model, axes: Axes, choices: Choices, layout: LayoutConfig
    ) -> ModuleTable:
        from gridformer.parallel.sharding import ParamPlacement, shard_parameter, vocabulary_width
        from gridformer.parallel.tensor.linear import (
            GridTiedHead,
            GridTokenEmbedding,
            RowParallelLabelHead,
            Schedules,
            grid_product,
            shard_heads,
        )
        from gridformer.parallel.tensor.loss import VocabParallelCrossEntropy
        from gridformer.parallel.tensor.norm import VECTOR, GridNorm, shard_vectors
        from gridformer.parallel.tensor.summa import boundary_of

        schedules = Schedules(axes, boundary_of(self.boundary(layout), axes))
        head, table = choices["head"], schedules.gathered_weight(choices["head"])
        vocab_size = model.config.vocab_size
        # Tables that are looked up locally (positions, segments, relative biases) are sharded over
        # columns: they are small, and no device needs the columns of another.
        over_columns = ParamPlacement(cut=(None, "col"), copies="row", partial=True)
        everywhere = ParamPlacement(cut=(None,), copies="grid", partial=True)

        def linear(plain: blocks.Linear | blocks.MergedLinear) -> nn.Module:
            return grid_product(plain, choices[plain.role.product], VECTOR, schedules)

        def norm(plain: blocks.LayerNorm | blocks.RMSNorm) -> nn.Module | None:
            if axes.col.size > 1:
                return GridNorm(plain, axes)
            shard_vectors(plain, axes)  # a device has whole rows
            return None

        def looked_up(plain: nn.Module) -> None:
            shard_parameter(plain, "weight", over_columns, axes)

        def waves(plain: blocks.SinusoidalPositions) -> None:
            plain.columns = (axes.col.index, axes.col.size)

        def dropout(plain: blocks.Dropout) -> None:
            plain.block = (0, axes.col.index)

        def attention(plain: blocks.Attention | blocks.CrossAttention) -> None:
            shard_heads(plain, model.config, axes.col)

        def head_norm(plain: blocks.HeadNorm) -> None:
            shard_parameter(plain, "weight", everywhere, axes)

        return ModuleTable(
            {
                "opening": linear,
                "closing": linear,
                "pooler": linear,
                "transform": linear,
                "norm": norm,
                "token_embedding": lambda plain: GridTokenEmbedding(plain, head, table, schedules),
                "positions": looked_up,
                "segments": looked_up,
                "relative_bias": looked_up,
                "sinusoidal_positions": waves,
                "dropout": dropout,
                "attention": attention,
                "head_norm": head_norm,
                "tied_head": lambda plain: GridTiedHead(plain, head, table, schedules),
                "pooled_dropout": dropout,
                "label_head": lambda plain: RowParallelLabelHead(plain, "row", axes),
                "token_head": lambda plain: RowParallelLabelHead(plain, "row", axes),
                "cross_entropy": lambda plain: VocabParallelCrossEntropy(
                    axes.col, vocab_size, plain.smoothing, vocabulary_width(axes, vocab_size)
                ),
            }
        )
