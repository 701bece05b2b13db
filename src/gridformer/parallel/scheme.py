"""`SchemeSpec`: everything that distinguishes one parallel scheme, in one place.

Whatever depends on the scheme asks its spec; no code compares names of schemes. A new scheme is a
file with a subclass and a line in gridformer.config.layout, or an entry point of a package.
Specs are read before torch is imported: a module table imports what it needs when it is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from gridformer.config import LayoutConfig, ModelConfig, RunConfig
from gridformer.mesh.node_placement import NodeBlock, rank_grid, sizes_of
from gridformer.parallel.auto.cost import Choices, Stationary
from gridformer.parallel.auto.products import Product
from gridformer.parallel.fixes import Changes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gridformer.mesh import Axes
    from gridformer.models import Model
    from gridformer.models.blocks import ActivationPartition
    from gridformer.parallel.sharding import ParamPlacement

LayoutAxis = Literal["rows", "cols", "branches"]  # keys of a layout
MESH_AXIS: dict[LayoutAxis, str] = {"rows": "row", "cols": "col", "branches": "branch"}


def expert_axes(layout: LayoutConfig) -> set[str]:
    """Returns the names of the mesh axes of `layout.experts_over`."""
    return {"dp" if key == "dp" else MESH_AXIS[key] for key in layout.experts_over}


Cuts = dict[LayoutAxis | Literal["grid"], dict[str, int]]  # grid: rows and cols together

HEADS_WIDTH = "model.n_heads x model.head_dim"  # width of all heads together


@dataclass(frozen=True)
class BoundarySpec:
    """How activations [b, s, h] lie between sections over one axis of the mesh.

    Attributes:
        axis: The mesh axis of the collectives that enter and leave sections
            (gridformer.parallel.tensor.summa.gathered).
        activation_layout: The dimension that is sharded over the axis; or `replicated` if every
            device holds all of an activation; or `first` if only the first device holds it.
        h_over: The mesh axis that shards h as well, if tokens are sharded over `axis`.
    """

    axis: str
    activation_layout: Literal["replicated", "first", "b", "s", "h"]
    h_over: str = ""


@dataclass(frozen=True)
class ModuleTable:
    """Replacements of a plain model's modules, by their role (gridformer.parallel.build.role_of).

    Attributes:
        roles: For each role a function of the plain module. It returns the replacement, or None if
            the module stays, possibly modified. Or the placement of the module's weight. Modules of
            other roles stay unchanged.
        rest: Placement of every parameter that no role has placed; None leaves these whole.
        partition: How devices shard the saved inputs of recomputed blocks, if each of them would
            otherwise hold them in full.
        stops_early: See `gridformer.models.blocks.Recompute`.
    """

    roles: Mapping[str, Callable[[Any], nn.Module | None] | ParamPlacement]
    rest: Callable[[nn.Parameter], ParamPlacement] | None = None
    partition: ActivationPartition | None = None
    stops_early: bool = True


class SchemeSpec:
    """Everything that distinguishes one scheme. The methods here do what most schemes need.

    Attributes:
        axes: Keys of the layout that count its devices.
        keys: Other keys of the layout that apply to this scheme.
        mesh: Names of its mesh axes after pp and dp, outermost first.
        node_blocks: Whether a node holds a block of the mesh, which `auto` chooses.
        keep_share: `auto` keeps gathered operands if they add at most this share to what a device
            holds. It is small because a grid is chosen for memory. Gathering again was found to
            cost no measurable time on one machine (benchmarks/schemes/), and a fifth of a step's
            traffic.
    """

    name: ClassVar[str]
    axes: ClassVar[tuple[LayoutAxis, ...]] = ()
    keys: ClassVar[tuple[str, ...]] = ()
    mesh: ClassVar[tuple[str, ...]] = ("row", "col")
    node_blocks: ClassVar[bool] = True
    keep_share: ClassVar[float] = 1 / 32

    # ------------------------------------------------------------------ where things lie

    def boundary(self, layout: LayoutConfig) -> BoundarySpec:
        """Returns how activations lie between sections."""
        return BoundarySpec("col", "replicated")

    def samples_over(self, layout: LayoutConfig) -> LayoutAxis | None:
        """Returns the axis that shards the samples of a replica's micro-batch between sections."""
        return None

    def batch_parts(self, layout: LayoutConfig) -> int:
        """Returns over how many devices the sequences of a micro-batch are divided."""
        axis = self.samples_over(layout)
        return layout.dp * (int(getattr(layout, axis)) if axis else 1)

    def sequence_parts(self, layout: LayoutConfig) -> int:
        """Returns into how many equal parts the sequences must divide; see `SequenceRows`."""
        over_columns = self.boundary(layout).activation_layout == "s"
        cols, rows = layout.cols if over_columns else 1, layout.sequence_rows
        return rows * math.lcm(2, cols) if rows > 1 else cols

    def ranks(self, layout: LayoutConfig, block: NodeBlock | None) -> Tensor:
        """Returns the rank at each position of the mesh, int64 [pp, dp, *mesh]."""
        return rank_grid(sizes_of(layout), block)

    # ------------------------------------------------------------------ validation

    def keys_of(self, layout: LayoutConfig) -> tuple[str, ...]:
        """Returns those of `keys` that apply to a layout."""
        return self.keys

    def for_few_tokens(self, layout: LayoutConfig) -> Changes:
        """Returns what a layout leaves open that sends less if a pass has few tokens."""
        return {}

    def cuts(self, run: RunConfig) -> Cuts:
        """Returns what each axis shards: for config keys, values that its size must divide."""
        return {}

    def gathers(self, layout: LayoutConfig) -> tuple[str, ...]:
        """Returns the values of `keep_gathered` that apply, besides `auto`."""
        return ("none",)

    def replicas(self, layout: LayoutConfig) -> int:
        """Returns over how many devices `dp_mode` can shard replicated state."""
        return layout.dp

    # ------------------------------------------------------------------ descriptions, enumeration

    def describe(self, layout: LayoutConfig) -> str:
        """Returns the scheme with its grid, such as `optimus 2x2`."""
        return f"{self.name} {layout.rows}x{layout.cols}"

    def arrangements(self, devices: int) -> Iterator[dict[str, Any]]:
        """Yields every arrangement of that many devices, as values of layout keys.

        One device belongs to `single` alone.
        """
        if devices > 1:
            yield {"cols": devices}

    def may_win(self, run: RunConfig) -> bool:
        """Whether a search estimates this arrangement of the devices."""
        return True

    # ------------------------------------------------------------------ what `auto` decides

    def grid(self, layout: LayoutConfig) -> tuple[int, int]:
        """Returns the rows and columns over which products are sharded."""
        return layout.rows, layout.cols

    def common(self, product: Product, layout: LayoutConfig) -> bool:
        """Whether every device computes the full product for its own tokens."""
        return False

    def stationary(self, product: Product, layout: LayoutConfig) -> Stationary:
        """Returns which activation of a product is not sent.

        By default a section gathers its input and reduces its output.
        """
        return "input" if product.closes else "output"

    def reasons(self, choices: Choices, layout: LayoutConfig) -> list[str]:
        """Returns sentences for --explain that describe effects of the scheme itself."""
        return []

    def replica_elements(
        self, choices: Choices, layout: LayoutConfig, in_layers: float, others: float
    ) -> float:
        """Returns the elements of gradients and sharded parameters received from replicas per step.

        With ring collectives, the parameters of a layer travel `in_layers` times, all others
        `others` times.
        """
        outside, every = choices.head_parameters, choices.parameters
        sent = (every - outside) * in_layers + outside * others
        return over_replicas(layout, layout.dp, sent, every) / math.prod(self.grid(layout))

    def boundary_bytes(self, choices: Choices, layout: LayoutConfig, products: float) -> float:
        """Returns the bytes that a device receives at most over the boundary's axis in a step.

        `products` are those of the products.
        """
        return products

    # ------------------------------------------------------------------ memory

    def savings(self, layout: LayoutConfig) -> tuple[list[Changes], list[Changes]]:
        """Returns settings that save memory: first those that cost no time, then the others."""
        return [], []

    # ------------------------------------------------------------------ modules

    def table(
        self, model: Model, axes: Axes, choices: Choices, layout: LayoutConfig
    ) -> ModuleTable | None:
        """Returns the replacements of a plain model's modules; None if all of them stay."""
        return None

    def mixture(self, axes: Axes, layout: LayoutConfig) -> Callable[[Any], nn.Module | None]:
        """Returns what becomes of a mixture of experts, if the table does not say it."""
        from gridformer.parallel.sharding import ParamPlacement
        from gridformer.parallel.tensor.experts import mixture_role

        router = ParamPlacement((None, None), copies="grid", partial=True)
        return mixture_role(axes, layout, self.boundary(layout), router)


def over_replicas(layout: LayoutConfig, n: int, sent: float, summed: float) -> float:
    """Returns the elements received from n replicas, with ring collectives.

    `sent` elements travel between those that shard, and of `summed` each its part across groups.
    """
    shards = layout.shard_over or n
    return (shards - 1) / shards * sent + 2 * (1 / shards - 1 / n) * summed


class Single(SchemeSpec):
    """One device per replica: the reference that every other scheme must equal."""

    name = "single"

    def describe(self, layout: LayoutConfig) -> str:
        return "single device"

    def arrangements(self, devices: int) -> Iterator[dict[str, Any]]:
        if devices == 1:
            yield {}

    def grid(self, layout: LayoutConfig) -> tuple[int, int]:
        return 1, 1


def has_pooler(model: ModelConfig) -> bool:
    """Whether a model has an output branch with a pooler that reads one token per sequence."""
    return model.pooled_labels or (model.family == "bert" and model.sentence_pair)


def feed_forward_cuts(model: ModelConfig) -> dict[str, int]:
    """Returns the inner widths of the feed-forwards that all tokens pass."""
    cut = {"model.ffn_size": model.ffn_size} if model.dense_layers or not model.n_experts else {}
    return cut | ({"model.shared_size": model.shared_size} if model.shared_size else {})


def sequence_cuts(run: RunConfig) -> dict[str, int]:
    """Returns what is sharded if activations are sharded over s: the sequence lengths."""
    cut = {"data.seq_len": run.seq_len}
    if run.model.two_stacks:
        cut |= {"data.source_len": run.source_len}
    return cut
