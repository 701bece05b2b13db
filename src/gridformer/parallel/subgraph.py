"""SUPER: sub-graph parallelism of transformers (Jain et al. 2021).

Attention heads and slices of the feed-forward are branches. Each of g sub-grids holds 1/g of them
and runs them for the samples of all, so weights are sharded as in Megatron, and only the boundary
of a section differs (gridformer.parallel.tensor.summa.gathered):

    D&SP        common layers on all processes, b sharded      all-gather, reduce-scatter of b
    D&SP-cSub   common layers on the first sub-grid only       broadcast, reduce

With `attention: outside`, slices of q, k and v enter the branches and the outputs of heads leave
them. In D&SP-cSub tensors between sections are on the meta device on the other sub-grids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gridformer.config import LayoutConfig, RunConfig
from gridformer.mesh.node_placement import NodeBlock, split_messages, sub_grids
from gridformer.parallel.auto.cost import Choices
from gridformer.parallel.auto.products import Product
from gridformer.parallel.scheme import (
    BoundarySpec,
    Cuts,
    LayoutAxis,
    ModuleTable,
    SchemeSpec,
    feed_forward_cuts,
    over_replicas,
)
from gridformer.utils.units import counted

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gridformer.mesh import Axes
    from gridformer.models import Model


class Branched(SchemeSpec):
    """The spec of sub-graph parallelism: D&SP (`common: all`) and D&SP-cSub (`common: first`)."""

    name = "subgraph"
    axes = ("branches",)
    keys = ("common", "attention", "feed_forward", "order")
    mesh = ("branch",)
    node_blocks = False  # `order` places the ranks
    keep_share = 1.0  # SUPER keeps the gathered input of a branch, too

    def boundary(self, layout: LayoutConfig) -> BoundarySpec:
        return BoundarySpec("branch", "b" if layout.common == "all" else "first")

    def samples_over(self, layout: LayoutConfig) -> LayoutAxis | None:
        return "branches" if layout.common == "all" else None

    def ranks(self, layout: LayoutConfig, block: NodeBlock | None) -> Tensor:
        return sub_grids(layout.pp, layout.dp, layout.branches, layout.order)

    def cuts(self, run: RunConfig) -> Cuts:
        cut = {"model.n_heads": run.model.n_heads}
        if run.layout.feed_forward == "branched":
            cut |= feed_forward_cuts(run.model)
        return {"branches": cut}

    def gathers(self, layout: LayoutConfig) -> tuple[str, ...]:
        return ("none", "inputs")

    def replicas(self, layout: LayoutConfig) -> int:
        """Common layers on all sub-grids are replicas, too."""
        return layout.dp * (layout.branches if layout.common == "all" else 1)

    def describe(self, layout: LayoutConfig) -> str:
        where = ", common layers on the first" if layout.common == "first" else ""
        return f"{self.name}, {counted(layout.branches, 'branch')}{where}"

    def arrangements(self, devices: int) -> Iterator[dict[str, Any]]:
        if devices > 1:
            yield {"branches": devices}
            yield {"branches": devices, "common": "first"}

    def grid(self, layout: LayoutConfig) -> tuple[int, int]:
        return 1, layout.branches

    def common(self, product: Product, layout: LayoutConfig) -> bool:
        inside = {
            "attention": layout.attention == "inside",
            "feed_forward": layout.feed_forward == "branched",
        }
        return not inside.get(product.section, False)

    def reasons(self, choices: Choices, layout: LayoutConfig) -> list[str]:
        branched = [name for name, choice in choices.products.items() if not choice.common]
        share = choices.branched_parameters / choices.parameters
        sentences = [
            f"branches: {', '.join(branched) or 'no product'} in {layout.branches} branches, "
            f"{share:.0%} of the parameters, whose gradients are summed over dp={layout.dp} "
            "processes"
        ]
        if layout.attention == "outside":
            entering, leaving = 3.0, 1.0  # widths of each layer's attention
            joined = [c.product for c in choices.products.values() if c.product.name == "qkv"]
            if joined and joined[0].parts:
                entering = (joined[0].n_out + joined[0].copied) / joined[0].n_in
                leaving = joined[0].parts[0][0] / joined[0].n_in
            left = "h" if leaving == 1 else f"{leaving:g} h"
            sentences.append(
                f"attention: slices of q, k and v enter the branches, {entering:g} h per token, "
                f"and the heads' outputs leave them, {left} per token"
            )
        if layout.devices_per_node:
            n, k = layout.dp * layout.branches, layout.devices_per_node
            units = [k, *[k * layout.nodes_per_rack] * (layout.nodes_per_rack > 0)]
            within, *beyond = split_messages(n, layout.branches, units, layout.order)
            far = f"{beyond[0]} go between them"
            if layout.nodes_per_rack:
                far = f"{beyond[0]} go between nodes of a rack, and {beyond[1]} between racks"
            sentences.append(
                f"order: {layout.order}; of the messages of one split {within} stay within "
                f"nodes of {k} and {far}"
            )
        return sentences

    def replica_elements(
        self, choices: Choices, layout: LayoutConfig, in_layers: float, others: float
    ) -> float:
        outside, inside = choices.head_parameters, choices.branched_parameters
        common = (choices.parameters - outside - inside) * in_layers + outside * others
        branches = inside / layout.branches
        shared = over_replicas(layout, layout.dp, branches * in_layers, branches)
        every = choices.parameters - inside
        return shared + over_replicas(layout, self.replicas(layout), common, every)

    def boundary_bytes(self, choices: Choices, layout: LayoutConfig, products: float) -> float:
        """Adds the slices and heads' outputs of `attention: outside` to what products receive.

        Slices are outputs of the products that open attention, and heads' outputs are inputs of
        those that close it. Both travel forward and, as gradients, backward, and forward once more
        if the section is recomputed. In D&SP-cSub the first sub-grid sends and receives all slices,
        while the others receive what the products send.
        """
        if layout.attention == "inside":
            return products
        g, work = layout.branches, choices.work
        every = 0.0
        for product in (choice.product for choice in choices.products.values()):
            if product.section == "attention":
                width = product.n_in if product.closes else product.n_out + product.copied
                times = 2 + work.recomputed
                every += times * width * product.count * work.rows_of(product)
        every *= work.micro_batches * work.itemsize
        if layout.common == "first":
            inputs = work.micro_batches * choices.inputs_again() * work.itemsize
            return max(products + every / g, (every / g + inputs) * (g - 1))
        return products + every / g * (g - 1) / g

    def mixture(self, axes: Axes, layout: LayoutConfig) -> Callable[[Any], nn.Module | None]:
        from torch import nn

        from gridformer.parallel.sharding import ParamPlacement
        from gridformer.parallel.tensor.experts import mixture_role

        first = layout.common == "first"
        common = layout.feed_forward == "common" and "branches" not in layout.experts_over
        if common and first and axes.branch.index > 0:
            return lambda plain: nn.Identity()
        router = ParamPlacement((None, None), replicas="dp_branch")
        if first:
            copies = None if common else "branch"
            router = ParamPlacement((None, None), copies=copies, partial=True)
        return mixture_role(axes, layout, self.boundary(layout), router, common)

    def table(
        self, model: Model, axes: Axes, choices: Choices, layout: LayoutConfig
    ) -> ModuleTable | None:
        import torch
        from torch import nn

        from gridformer.models import blocks
        from gridformer.parallel.sharding import ParamPlacement
        from gridformer.parallel.tensor.branched import (
            ConcatLinear,
            Elsewhere,
            GatheredMask,
            GatheredRows,
            NoEmbedding,
            NoPositions,
            SliceLinear,
            SliceMerged,
        )
        from gridformer.parallel.tensor.linear import Schedules, grid_product, shard_heads
        from gridformer.parallel.tensor.partitioned_activations import PartitionedFromFirst
        from gridformer.parallel.tensor.summa import boundary_of

        branch = axes.branch
        if branch.size == 1:
            return None
        first = layout.common == "first"
        absent = first and branch.index > 0  # has no common layers
        as_grid = replace(axes, col=branch)  # a grid of one row and g columns
        schedules = Schedules(as_grid, boundary_of(self.boundary(layout), axes))
        width = model.config.hidden_size

        def common(parameter: nn.Parameter) -> ParamPlacement:
            return ParamPlacement(
                (None,) * parameter.dim(), replicas="dp" if first else "dp_branch"
            )

        def linear(plain: blocks.Linear | blocks.MergedLinear) -> nn.Module | None:
            choice = choices[plain.role.product]
            if not choice.common:
                bias = ParamPlacement(cut=("col",))
                if isinstance(plain, blocks.Linear) and not plain.role.opens:
                    bias = ParamPlacement((None,), replicas="dp" if first else "dp_branch")
                    if absent:
                        plain.bias = None  # added on the first sub-grid, after the sum
                return grid_product(plain, choice, bias, schedules)
            if isinstance(plain, blocks.MergedLinear) and plain.role.section == "attention":
                return SliceMerged(plain, axes, first)
            if isinstance(plain, blocks.Linear) and plain.role.section == "attention":
                slices = SliceLinear if plain.role.opens else ConcatLinear
                return slices(plain, axes, first)
            return nothing(plain) if absent else None  # a feed-forward is replaced as a whole

        def nothing(plain: nn.Module) -> nn.Module:
            return nn.Identity()

        def feed_forward(plain: blocks.FeedForward | blocks.GatedFeedForward) -> nn.Module | None:
            return nothing(plain) if choices[plain.up.role.product].common else None

        def attention(plain: blocks.Attention | blocks.CrossAttention) -> None:
            shard_heads(plain, model.config, axes, "branch")
            if not first:
                plain.sample_block = branch.index  # it gets the samples of all g processes

        roles: dict[str, Any] = {
            **dict.fromkeys(("opening", "closing", "pooler", "transform"), linear),
            "attention": attention,
            "head_norm": ParamPlacement((None,), copies="branch", partial=True),
            "relative_bias": ParamPlacement((None, "branch")),
        }
        if not first:
            roles["padding_mask"] = lambda plain: GatheredMask(branch)
            roles["attending_rows"] = lambda plain: GatheredRows(branch)
        heads_and_losses = "tied_head", "cross_entropy", "label_loss", "classifier", "span_head"
        if absent:
            roles |= {
                "feed_forward": feed_forward,
                **dict.fromkeys(("norm", "dropout"), nothing),
                **dict.fromkeys(("token_embedding", "segments"), lambda _: NoEmbedding(width)),
                **dict.fromkeys(
                    ("positions", "sinusoidal_positions"), lambda _: NoPositions(width)
                ),
                **dict.fromkeys(heads_and_losses, lambda _: Elsewhere()),
            }
        # The first sub-grid recomputes a block to its last product, or to its end; the others must
        # recompute as far.
        to_the_end = model.config.norm_position == "post" or layout.feed_forward == "common"
        return ModuleTable(
            roles,
            rest=None if absent else common,
            partition=PartitionedFromFirst(branch, torch.device(axes.device_type))
            if first
            else None,
            stops_early=not (absent and to_the_end),
        )
