"""Megatron whose weights are cut both ways: two-dimensional, with local norms.

What NVIDIA calls Generalized Tensor Parallelism does to weights, on Megatron's sequence-parallel
form (specification, section 5, last row). On an r x c grid of devices:

    activations [b, s, h]   b over rows, s over columns between sections: [b/r, s/c, h]
    weights [in, out]       over columns as Megatron cuts them, their other dimension over rows:
                            [in/r, out/c] where a section opens, [in/c, out/r] where it closes

A section gathers s along a row of devices when it is entered and reduce-scatters it when it is
left. A weight is gathered down its column when it is needed, while the product before it
multiplies, and its gradient is reduce-scattered there. So a device moves, a layer and forward pass,

    (c-1)/(rc) 4bsh + (r-1)/(rc) 12h²

which is the least that an Optimus grid moves; but a norm has whole vectors and sends nothing. With
one row it is Megatron, sequence parallel; with one column every layer is gathered, as ZeRO-3 does.
Norms, biases of closing products and the table of positions are on every device, and so is BERT's
`transform`, each device computing it for its own tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gridformer.config import LayoutConfig, RunConfig, divisors
from gridformer.parallel.auto.cost import Choices, Product
from gridformer.parallel.megatron import one_dimensional
from gridformer.parallel.scheme import (
    BoundarySpec,
    Cuts,
    LayoutAxis,
    ModuleTable,
    SchemeSpec,
    has_pooler,
    sequence_cuts,
)

if TYPE_CHECKING:
    from gridformer.mesh import Axes
    from gridformer.models import Model


class Megatron2D(SchemeSpec):
    name = "megatron_2d"
    axes = ("rows", "cols")

    def boundary(self, layout: LayoutConfig) -> BoundarySpec:
        return BoundarySpec("col", "s")

    def samples_over(self, layout: LayoutConfig) -> LayoutAxis | None:
        return "rows"

    def cuts(self, run: RunConfig) -> Cuts:
        model = run.model
        hidden = {"model.hidden_size": model.hidden_size}
        cols = {"model.n_heads": model.n_heads, "model.ffn_size": model.ffn_size}
        cols |= sequence_cuts(run)
        return {"rows": hidden, "cols": cols | (hidden if has_pooler(model) else {})}

    def gathers(self, layout: LayoutConfig) -> tuple[str, ...]:
        return ("none", "inputs", "weights", "all")

    def arrangements(self, devices: int) -> Iterator[dict[str, Any]]:
        for rows in divisors(devices):
            if rows > 1:  # of one row it is `megatron`, sequence parallel
                yield {"rows": rows, "cols": devices // rows}

    def common(self, product: Product, layout: LayoutConfig) -> bool:
        return product.name == "transform"

    def table(
        self, model: Model, axes: Axes, choices: Choices, layout: LayoutConfig
    ) -> ModuleTable:
        from gridformer.parallel.sharding import ParamPlacement

        whole = ParamPlacement((None,), copies="grid", partial=True)
        return one_dimensional(model, axes, choices, self.boundary(layout), whole)
