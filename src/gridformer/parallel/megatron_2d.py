"""Megatron with weights sharded both ways: two-dimensional, with local norms.

It treats weights as NVIDIA's Generalized Tensor Parallelism does, on top of Megatron's
sequence-parallel form. On an r x c grid of devices:

    activations [b, s, h]   b over rows, s over columns between sections: [b/r, s/c, h]
    weights [in, out]       over columns as in Megatron, and the other dimension over rows:
                            [in/r, out/c] where a section opens, [in/c, out/r] where it closes

A section all-gathers s along a row of devices at its start and reduce-scatters it at its end. A
weight is all-gathered down its column while the previous product multiplies, and its gradient is
reduce-scattered there. A device thus receives, per layer and forward pass,

    (c-1)/(rc) 4bsh + (r-1)/(rc) 12h²

elements, the least that an Optimus grid moves; and a norm has whole vectors, so it sends nothing.
With one row this is sequence-parallel Megatron; with one column every layer is gathered, as in
ZeRO-3. Norms, biases of closing products and position tables are replicated on every device, as is
BERT's `transform`, which each device computes for its own tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gridformer.config import LayoutConfig, RunConfig, divisors
from gridformer.parallel.auto.cost import Choices
from gridformer.parallel.auto.products import Product
from gridformer.parallel.fixes import Changes
from gridformer.parallel.megatron import one_dimensional
from gridformer.parallel.scheme import (
    BoundarySpec,
    Cuts,
    LayoutAxis,
    ModuleTable,
    SchemeSpec,
    feed_forward_cuts,
    has_pooler,
    sequence_cuts,
)

if TYPE_CHECKING:
    from gridformer.mesh import Axes
    from gridformer.models import Model


class Megatron2D(SchemeSpec):
    """The spec of sequence-parallel Megatron with weights sharded over rows, too."""

    name = "megatron_2d"
    axes = ("rows", "cols")
    keys = ("rows_over",)

    def boundary(self, layout: LayoutConfig) -> BoundarySpec:
        return BoundarySpec("col", "s")

    def samples_over(self, layout: LayoutConfig) -> LayoutAxis | None:
        return "rows" if layout.sequence_rows == 1 else None

    def for_few_tokens(self, layout: LayoutConfig) -> Changes:
        few: Changes = {"layout.scheme": "optimus", "layout.stationary": "weight"}
        return few if layout.rows > 1 else {}

    def cuts(self, run: RunConfig) -> Cuts:
        model = run.model
        hidden = {"model.hidden_size": model.hidden_size}
        cols = {"model.n_heads": model.n_heads, **feed_forward_cuts(model)}
        cols |= sequence_cuts(run)
        return {"rows": hidden, "cols": cols | (hidden if has_pooler(model) else {})}

    def gathers(self, layout: LayoutConfig) -> tuple[str, ...]:
        return ("none", "inputs", "weights", "all")

    def arrangements(self, devices: int) -> Iterator[dict[str, Any]]:
        for rows in divisors(devices):
            if rows > 1:  # one row is `megatron` with sequence_parallel
                yield {"rows": rows, "cols": devices // rows}

    def common(self, product: Product, layout: LayoutConfig) -> bool:
        return product.name == "transform"

    def table(
        self, model: Model, axes: Axes, choices: Choices, layout: LayoutConfig
    ) -> ModuleTable:
        from gridformer.parallel.sharding import ParamPlacement

        whole = ParamPlacement((None,), copies="grid", partial=True)
        return one_dimensional(model, axes, choices, self.boundary(layout), whole)
