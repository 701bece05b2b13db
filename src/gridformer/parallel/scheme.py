"""What a scheme is, said in one place: a `SchemeSpec`.

A scheme says where weights lie and how activations are cut between sections (specification,
section 5). Whatever depends on the scheme asks its spec: validation and its offers
(gridformer.parallel.validation), `gridformer layouts`, `auto`
(gridformer.parallel.auto.heuristics), pipelines, memory estimates, descriptions, and the walk over
a model's modules (gridformer.parallel.walk). Nobody compares names of schemes. A new scheme is one
file with a subclass, a line in gridformer.parallel.registry, and a name in
gridformer.config.layout.

Specs are read before torch is imported: a module table imports what it needs when it is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from gridformer.config import LayoutConfig, ModelConfig, RunConfig, Scheme
from gridformer.mesh.node_placement import NodeBlock, rank_grid, sizes_of
from gridformer.parallel.auto.cost import Choices, Product, Stays
from gridformer.parallel.offers import Changes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gridformer.mesh import Axes
    from gridformer.models import Model
    from gridformer.models.blocks import ActivationPartition
    from gridformer.parallel.sharding import ParamPlacement

LayoutAxis = Literal["rows", "cols", "branches"]  # keys of a layout
MESH_AXIS: dict[LayoutAxis, str] = {"rows": "row", "cols": "col", "branches": "branch"}
Cuts = dict[LayoutAxis, dict[str, int]]

HEADS_WIDTH = "model.n_heads x model.head_dim"  # all heads side by side


@dataclass(frozen=True)
class BoundarySpec:
    """How activations [b, s, h] lie between sections over one axis of the mesh.

    axis: the mesh axis over which sections are entered and left
    (gridformer.parallel.tensor.boundary).
    lies: the dimension that is cut over it, or `replicated`: every device holds all of it, or
        `first`: the first device alone holds it.
    """

    axis: str
    lies: Literal["replicated", "first", "b", "s", "h"]


@dataclass(frozen=True)
class ModuleTable:
    """What becomes of a plain model's modules, by their role (gridformer.parallel.walk.role_of).

    roles: a function of the plain module which returns what takes its place, or None where it
        stays, perhaps changed. Roles without an entry stay as they are.
    rest: where every parameter lies that no role has placed; None leaves them to be whole.
    partition: how devices share the inputs of blocks that are recomputed, where each would hold
        them whole. stops_early: see `gridformer.models.blocks.Recompute`.
    """

    roles: Mapping[str, Callable[[Any], nn.Module | None]]
    rest: Callable[[nn.Parameter], ParamPlacement] | None = None
    partition: ActivationPartition | None = None
    stops_early: bool = True


class SchemeSpec:
    """Everything that sets one scheme apart. What is here is what most schemes do.

    name: in run files. axes: keys of the layout that count its devices. keys: other keys of the
    layout that mean something under this scheme. mesh: names of its mesh axes, behind pp and dp,
    outermost first. node_blocks: whether nodes hold blocks of the mesh, which `auto` chooses.
    keep_share: `auto` keeps gathered operands as long as they add no more than this share to what
    a device holds; a grid is chosen for memory, and gathering again was found to cost no time that
    can be measured on one machine (benchmarks/schemes/), and a fifth of a step's traffic.
    """

    name: ClassVar[Scheme]
    axes: ClassVar[tuple[LayoutAxis, ...]] = ()
    keys: ClassVar[tuple[str, ...]] = ()
    mesh: ClassVar[tuple[str, ...]] = ("row", "col")
    node_blocks: ClassVar[bool] = True
    keep_share: ClassVar[float] = 1 / 32

    # ------------------------------------------------------------------ where things lie

    def boundary(self, layout: LayoutConfig) -> BoundarySpec:
        """How activations lie between sections."""
        return BoundarySpec("col", "replicated")

    def samples_over(self, layout: LayoutConfig) -> LayoutAxis | None:
        """The axis over which the samples of one replica's micro-batch are cut between sections."""
        return None

    def ranks(self, layout: LayoutConfig, block: NodeBlock | None) -> Tensor:
        """The rank at each place of the mesh, int64: [pp, dp, *mesh]."""
        return rank_grid(sizes_of(layout), block)

    # ------------------------------------------------------------------ validation

    def cuts(self, run: RunConfig) -> Cuts:
        """What is cut over each axis: each of these values must divide by the axis's size."""
        return {}

    def gathers(self, layout: LayoutConfig) -> tuple[str, ...]:
        """Values of `keep_gathered` that mean something, besides `auto`."""
        return ("none",)

    def replicas(self, layout: LayoutConfig) -> int:
        """How many devices hold copies that `dp_mode` can share out."""
        return layout.dp

    # ------------------------------------------------------------------ for people, and enumeration

    def describe(self, layout: LayoutConfig) -> str:
        """The scheme with its grid: `optimus 2x2`."""
        return f"{self.name} {layout.rows}x{layout.cols}"

    def arrangements(self, devices: int) -> Iterator[dict[str, Any]]:
        """Every way to arrange so many devices, as values of the layout. One device is `single`."""
        if devices > 1:
            yield {"cols": devices}

    # ------------------------------------------------------------------ what `auto` decides

    def grid(self, layout: LayoutConfig) -> tuple[int, int]:
        """Rows and columns over which products are cut."""
        return layout.rows, layout.cols

    def common(self, product: Product, layout: LayoutConfig) -> bool:
        """Whether every device computes a product whole, for the tokens that it has."""
        return False

    def stays(self, product: Product, layout: LayoutConfig) -> Stays:
        """Which activation of a product does not travel: sections are entered and left."""
        return "input" if product.closes else "output"

    def reasons(self, choices: Choices, layout: LayoutConfig) -> list[str]:
        """Sentences for --explain about what the scheme itself brings about."""
        return []

    def replica_elements(self, choices: Choices, layout: LayoutConfig, again: int) -> float:
        """Elements of gradients and cut parameters that a device receives from replicas in a step,
        with ring collectives.

        again: how often a layer's parameters travel; all else travels twice.
        """
        outside = choices.head_parameters
        held = ((choices.parameters - outside) * again + outside * 2) / math.prod(self.grid(layout))
        return (layout.dp - 1) / layout.dp * held

    def boundary_bytes(self, choices: Choices, layout: LayoutConfig, products: float) -> float:
        """Bytes over the boundary's axis of the device that moves most in a step, where products
        move `products` there."""
        return products

    # ------------------------------------------------------------------ memory

    def savings(self, layout: LayoutConfig) -> tuple[list[Changes], list[Changes]]:
        """Settings of this scheme that save memory: those that cost no time, and the others."""
        return [], []

    # ------------------------------------------------------------------ modules

    def table(
        self, model: Model, axes: Axes, choices: Choices, layout: LayoutConfig
    ) -> ModuleTable | None:
        """What becomes of the modules of a plain model; None where all of them stay."""
        return None


def has_pooler(model: ModelConfig) -> bool:
    """Whether a branch reads one token of each sequence, through a pooler as wide as the model."""
    return model.n_labels > 0 or (model.family == "bert" and model.sentence_pair)


def sequence_cuts(run: RunConfig) -> dict[str, int]:
    """What is cut where activations are cut over s."""
    cut = {"data.seq_len": run.seq_len}
    if run.model.two_stacks:
        cut |= {"data.source_len": run.source_len}
    return cut
