"""A scheme of one's own: Megatron whose columns have different samples between sections.

A package brings it with an entry point in its pyproject.toml; then `layout.scheme=samples` is a
scheme as any other, and `gridformer prove samples` says whether it is exact:

    [project.entry-points."gridformer.schemes"]
    samples = "own_scheme:Samples"

As in Megatron, sections are sharded by heads and by columns of the feed-forward. Between sections
a device has 1/c of the samples, as in D&SP, so norms, dropout and residuals are not repeated: a
section all-gathers samples at its start and reduce-scatters them at its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gridformer.config import LayoutConfig, RunConfig
from gridformer.parallel.auto.cost import Choices, Stationary
from gridformer.parallel.auto.products import Product
from gridformer.parallel.scheme import BoundarySpec, Cuts, LayoutAxis, ModuleTable, SchemeSpec

if TYPE_CHECKING:
    from gridformer.mesh import Axes
    from gridformer.models import Model


class Samples(SchemeSpec):
    """The spec, which is read before torch is imported."""

    name = "samples"
    axes = ("cols",)

    def boundary(self, layout: LayoutConfig) -> BoundarySpec:
        return BoundarySpec("col", "b", h_over="row")  # there is one row

    def samples_over(self, layout: LayoutConfig) -> LayoutAxis:
        return "cols"

    def cuts(self, run: RunConfig) -> Cuts:
        model = run.model
        return {"cols": {"model.n_heads": model.n_heads, "model.ffn_size": model.ffn_size}}

    def gathers(self, layout: LayoutConfig) -> tuple[str, ...]:
        return ("none", "inputs")

    def common(self, product: Product, layout: LayoutConfig) -> bool:
        return product.name in ("transform", "pooler")

    def stationary(self, product: Product, layout: LayoutConfig) -> Stationary:
        return "weight"

    def table(
        self, model: Model, axes: Axes, choices: Choices, layout: LayoutConfig
    ) -> ModuleTable:
        from gridformer.parallel.tensor.stationary import stationary_table

        return stationary_table(model, axes, choices, self.boundary(layout))
