"""Megatron: one-dimensional tensor parallelism, and its sequence-parallel form.

See Shoeybi et al. 2019 and Korthikanti et al. 2022.

A section (attention, feed-forward) opens with weights sharded by columns and closes with weights
sharded by rows, so everything in between is local. It is a grid of one row: its products are those
of Optimus' `gather` schedule with weights that need no gathering. The two forms differ only in how
activations lie between sections: in the sequence-parallel form, norms, dropout, the output of the
embedding and the input of the head are sharded over s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gridformer.config import LayoutConfig, RunConfig
from gridformer.parallel.auto.cost import Choices
from gridformer.parallel.auto.products import Product
from gridformer.parallel.fixes import Changes
from gridformer.parallel.scheme import (
    BoundarySpec,
    Cuts,
    ModuleTable,
    SchemeSpec,
    feed_forward_cuts,
    has_pooler,
    sequence_cuts,
)

if TYPE_CHECKING:
    from torch import nn

    from gridformer.mesh import Axes
    from gridformer.models import Model, blocks
    from gridformer.models.blocks import ActivationPartition
    from gridformer.parallel.sharding import ParamPlacement


class Megatron(SchemeSpec):
    """The spec of Megatron and of its sequence-parallel form."""

    name = "megatron"
    axes = ("cols",)
    keys = ("sequence_parallel", "scatter_gather")

    def boundary(self, layout: LayoutConfig) -> BoundarySpec:
        return BoundarySpec("col", "s" if layout.sequence_parallel else "replicated")

    def cuts(self, run: RunConfig) -> Cuts:
        model = run.model
        cut = {"model.n_heads": model.n_heads, **feed_forward_cuts(model)}
        if run.layout.sequence_parallel:
            cut |= sequence_cuts(run)
        if has_pooler(model):
            cut |= {"model.hidden_size": model.hidden_size}
        return {"cols": cut}

    def gathers(self, layout: LayoutConfig) -> tuple[str, ...]:
        return ("none", "inputs") if layout.sequence_parallel else ("none",)

    def describe(self, layout: LayoutConfig) -> str:
        sequence = ", sequence parallel" if layout.sequence_parallel else ""
        return f"{self.name} 1x{layout.cols}{sequence}"

    def arrangements(self, devices: int) -> Iterator[dict[str, Any]]:
        if devices > 1:
            yield {"cols": devices}
            yield {"cols": devices, "sequence_parallel": True}

    def grid(self, layout: LayoutConfig) -> tuple[int, int]:
        return 1, layout.cols

    def common(self, product: Product, layout: LayoutConfig) -> bool:
        # Every device has the input of this product, for all tokens or for its part of them.
        return product.name == "transform"

    def savings(self, layout: LayoutConfig) -> tuple[list[Changes], list[Changes]]:
        if layout.sequence_parallel or layout.cols == 1:
            return [], []
        return [{"layout.sequence_parallel": True}], []

    def table(
        self, model: Model, axes: Axes, choices: Choices, layout: LayoutConfig
    ) -> ModuleTable:
        from gridformer.parallel.sharding import ParamPlacement
        from gridformer.parallel.tensor.partitioned_activations import PartitionedActivations

        cuts_sequence = layout.sequence_parallel
        partition = None if cuts_sequence else PartitionedActivations(axes.col)
        # Every device holds a copy of these. With s sharded it has seen only a part of the tokens.
        closing = ParamPlacement((None,), copies="col", partial=cuts_sequence)
        return one_dimensional(model, axes, choices, self.boundary(layout), closing, partition)


def one_dimensional(
    model: Model,
    axes: Axes,
    choices: Choices,
    boundary: BoundarySpec,
    whole: ParamPlacement,
    partition: ActivationPartition | None = None,
) -> ModuleTable:
    """Returns the module table of schemes that shard sections by columns and have local norms.

    `whole` is the placement of vectors that every device needs in full between sections.
    """
    from gridformer.parallel.sharding import ParamPlacement
    from gridformer.parallel.tensor.linear import (
        Schedules,
        grid_product,
        grid_roles,
    )
    from gridformer.parallel.tensor.sequence import token_roles, tokens_of
    from gridformer.parallel.tensor.summa import InRankOrder, Replicated, boundary_of

    col, cuts_sequence = axes.col, boundary.activation_layout == "s"
    in_order = InRankOrder(col) if cuts_sequence else None  # a feed-forward treats tokens alike
    schedules = Schedules(axes, boundary_of(boundary, axes), in_order, choices.late_gradients)
    of_chosen = Schedules(axes, Replicated(col))  # every device has the chosen tokens
    opening = ParamPlacement(("col",), copies="row", partial=True)
    tokens = tokens_of(axes, cuts_sequence)

    def everywhere(parameter: nn.Parameter) -> ParamPlacement:
        return replace(whole, cut=(None,) * parameter.dim())

    def linear(plain: blocks.Linear | blocks.MergedLinear) -> nn.Module:
        bias = opening if plain.role.opens else whole
        return grid_product(plain, choices[plain.role.product], bias, schedules)

    def pooler(plain: blocks.Linear) -> nn.Module:
        return grid_product(plain, choices[plain.role.product], opening, of_chosen)

    def positions(plain: blocks.PositionEmbedding | blocks.SegmentEmbedding) -> None:
        plain.part = tokens.part

    roles: dict[str, Any] = {
        **grid_roles(model, axes, choices, schedules),
        "opening": linear,
        "closing": linear,
        "pooler": pooler,
        "positions": positions,
        "segments": positions,
        "sinusoidal_positions": positions,
        "relative_bias": ParamPlacement((None, "col"), copies="row", partial=True),
        # A column has other heads, so gradients are partial sums whether tokens are sharded or not.
        "head_norm": ParamPlacement((None,), copies="grid", partial=True),
        **token_roles(axes, tokens, 0, col.index),
    }
    return ModuleTable(roles, rest=everywhere, partition=partition)
