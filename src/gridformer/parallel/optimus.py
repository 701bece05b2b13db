"""Optimus: two-dimensional tensor parallelism on an r x c grid.

Xu, Li, Gong, You 2021, "An Efficient 2D Method for Training Super-Large Deep Learning Models".
Activations [b, s, h] are sharded b over rows and h over columns; weights are sharded over both.
Every product is a SUMMA product (Algorithms 1 to 3, gridformer.parallel.tensor.summa). Attention is
local, because a device holds n/c heads of b/r whole sequences. A norm sums its statistics along a
row.

With `stationary: weight` (gridformer.parallel.tensor.stationary), no product sends its weight.
Activations are then sharded by tokens over columns and by h over rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gridformer.config import LayoutConfig, RunConfig, divisors
from gridformer.parallel.auto.cost import Choices, Stationary
from gridformer.parallel.auto.products import Product
from gridformer.parallel.fixes import Changes
from gridformer.parallel.scheme import (
    HEADS_WIDTH,
    BoundarySpec,
    Cuts,
    LayoutAxis,
    ModuleTable,
    SchemeSpec,
    feed_forward_cuts,
    sequence_cuts,
)

if TYPE_CHECKING:
    from torch import nn

    from gridformer.mesh import Axes
    from gridformer.models import Model, blocks


MOST_TOKENS = 2  # times h, of a micro-batch for which a search tries stationary weights


class Optimus(SchemeSpec):
    """The spec of Optimus on any r x c grid; the paper's grids are square."""

    name = "optimus"
    axes = ("rows", "cols")
    keys = ("schedule", "stationary", "sequence_parallel", "rows_over")

    def boundary(self, layout: LayoutConfig) -> BoundarySpec:
        if layout.stationary == "weight":
            return BoundarySpec("col", "s" if layout.sequence_parallel else "b", h_over="row")
        return BoundarySpec("col", "h")

    def samples_over(self, layout: LayoutConfig) -> LayoutAxis | None:
        if layout.stationary == "weight":
            return None if layout.sequence_parallel else "cols"
        return "rows" if layout.sequence_rows == 1 else None

    def keys_of(self, layout: LayoutConfig) -> tuple[str, ...]:
        if layout.stationary == "weight":
            return ("stationary", "sequence_parallel")
        return ("schedule", "stationary", "rows_over")

    def for_few_tokens(self, layout: LayoutConfig) -> Changes:
        open_ = layout.rows > 1 and layout.stationary == layout.schedule == "auto"
        return {"layout.stationary": "weight"} if open_ else {}

    def describe(self, layout: LayoutConfig) -> str:
        said = super().describe(layout)
        if layout.stationary == "weight":
            said += ", stationary weights" + ", sequence parallel" * layout.sequence_parallel
        return said

    def cuts(self, run: RunConfig) -> Cuts:
        model = run.model
        if run.layout.stationary == "weight":
            grid = {"model.n_heads": model.n_heads, **feed_forward_cuts(model)}
            cols = sequence_cuts(run) if run.layout.sequence_parallel else {}
            return {"rows": {"model.hidden_size": model.hidden_size}, "cols": cols, "grid": grid}
        both = {**feed_forward_cuts(model), "model.hidden_size": model.hidden_size}
        heads = {HEADS_WIDTH: model.n_heads * model.head_width} if model.head_dim else {}
        return {"rows": both | heads, "cols": {"model.n_heads": model.n_heads} | both}

    def gathers(self, layout: LayoutConfig) -> tuple[str, ...]:
        if layout.stationary == "weight":
            return ("none", "inputs")
        if layout.schedule in ("auto", "gather"):
            return ("none", "inputs", "weights", "all")
        return ("none",)

    def arrangements(self, devices: int) -> Iterator[dict[str, Any]]:
        if devices > 1:
            for rows in divisors(devices):
                yield (grid := {"rows": rows, "cols": devices // rows})
                if rows > 1:  # with one row no weight is sent anyway
                    yield {**grid, "stationary": "weight", "sequence_parallel": True}

    def common(self, product: Product, layout: LayoutConfig) -> bool:
        # Every column of devices computes these products for its own tokens.
        return layout.stationary == "weight" and product.name in ("transform", "pooler")

    def stationary(self, product: Product, layout: LayoutConfig) -> Stationary:
        """Returns which matrix stays: by default the wider activation.

        If both are equally wide, sections are entered and left as in other schemes.
        """
        if layout.stationary == "weight":
            return "weight"
        if product.parts:  # columns of all its parts lie side by side on one device
            return "output"
        if layout.stationary != "auto":
            return layout.stationary
        if product.n_in != product.n_out:
            return "input" if product.n_in > product.n_out else "output"
        return super().stationary(product, layout)

    def may_win(self, run: RunConfig) -> bool:
        """Stationary weights send more than other layouts where micro-batches have many tokens."""
        layout, few = run.layout, MOST_TOKENS * run.model.hidden_size
        n_micro = layout.dp * layout.micro_batches
        tokens = run.train.global_batch * run.seq_len
        return layout.stationary != "weight" or tokens <= few * n_micro

    def savings(self, layout: LayoutConfig) -> tuple[list[Changes], list[Changes]]:
        if layout.schedule == "pipelined" or layout.stationary == "weight":
            return [], []
        return [], [{"layout.schedule": "pipelined"}]

    def table(
        self, model: Model, axes: Axes, choices: Choices, layout: LayoutConfig
    ) -> ModuleTable:
        from gridformer.parallel.sharding import ParamPlacement
        from gridformer.parallel.tensor.linear import Schedules, grid_product, grid_roles
        from gridformer.parallel.tensor.norm import VECTOR, GridNorm, shard_vectors
        from gridformer.parallel.tensor.sequence import token_roles, tokens_of
        from gridformer.parallel.tensor.stationary import stationary_table
        from gridformer.parallel.tensor.summa import boundary_of

        if layout.stationary == "weight":
            return stationary_table(model, axes, choices, self.boundary(layout))
        schedules = Schedules(axes, boundary_of(self.boundary(layout), axes))
        roles: dict[str, Any] = {**grid_roles(model, axes, choices, schedules)}
        # Tables that are looked up locally (positions, segments, relative biases) are sharded over
        # columns: they are small, and no device needs the columns of another.
        over_columns = ParamPlacement(cut=(None, "col"), copies="row", partial=True)

        def linear(plain: blocks.Linear | blocks.MergedLinear) -> nn.Module:
            return grid_product(plain, choices[plain.role.product], VECTOR, schedules)

        def norm(plain: blocks.LayerNorm | blocks.RMSNorm) -> nn.Module | None:
            if axes.col.size > 1:
                return GridNorm(plain, axes)
            shard_vectors(plain, axes)  # a device has whole rows
            return None

        def waves(plain: blocks.SinusoidalPositions) -> None:
            plain.columns = (axes.col.index, axes.col.size)

        roles |= {
            **dict.fromkeys(("opening", "closing", "pooler", "transform"), linear),
            "norm": norm,
            "head_norm": ParamPlacement((None,), copies="grid", partial=True),
            **dict.fromkeys(("positions", "segments", "relative_bias"), over_columns),
            "sinusoidal_positions": waves,
            "token_head": roles["label_head"],
            **token_roles(axes, tokens_of(axes, False), axes.col.index, axes.col.index),
        }
        return ModuleTable(roles)
