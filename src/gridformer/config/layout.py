"""The `layout` section of a run: how a model is distributed over processes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from gridformer.config.base import Config, any_of
from gridformer.utils.errors import UserError
from gridformer.utils.units import MOST_LAYERS, MOST_PROCESSES

GROUP = "gridformer.schemes"  # the entry points of packages that bring schemes
# The schemes of this package: where the spec of each is, and what it does to a model.
_OURS = {
    "single": ("scheme:Single", "leaves it on one device"),
    "megatron": ("megatron:Megatron", "shards it over columns"),
    "megatron_2d": ("megatron_2d:Megatron2D", "shards it over rows and columns, with local norms"),
    "optimus": ("optimus:Optimus", "shards it over rows and columns"),
    "subgraph": ("subgraph:Branched", "divides its branches among sub-grids"),
}
_SAID = "; ".join(f"{name} {what}" for name, (_, what) in _OURS.items())


@cache
def schemes() -> dict[str, EntryPoint]:
    """Returns where the spec of every installed scheme is, by name. Nothing is imported.

    Raises:
        UserError: A package brings a scheme whose name is taken.
    """
    ours = {name: f"gridformer.parallel.{where}" for name, (where, _) in _OURS.items()}
    entries = {name: EntryPoint(name, where, GROUP) for name, where in ours.items()}
    for entry in entry_points(group=GROUP):
        if taken := entries.get(entry.name):
            raise UserError(
                f"the entry point {entry.name} = {entry.value} of {GROUP} has the name of the "
                f"scheme {taken.value}: rename it, or uninstall its package"
            )
        entries[entry.name] = entry
    return entries


def _scheme(name: str) -> str:
    if name not in _OURS and name not in schemes():
        expected = any_of(f"'{known}'" for known in schemes())
        raise PydanticCustomError(
            "literal_error", "Input should be {expected}", {"expected": expected}
        )
    return name


Scheme = Annotated[str, AfterValidator(_scheme), WithJsonSchema({"enum": [*_OURS]})]
PipelineOrder = Literal["gpipe", "1f1b", "interleaved", "zb_h1", "zbv"]


class LayoutConfig(Config):
    """How a model is distributed over rows x cols x branches x dp x pp processes.

    A scheme shards each replica over a grid of rows x cols devices. With `scheme=subgraph`,
    `branches` sub-grids of dp processes each take the place of the grid.

    `schedule`, `stationary` and `keep_gathered` determine how matrix products communicate, and
    `reshard` determines how often parameters are gathered. `auto` decides from message sizes and
    memory, and `gridformer train --explain` prints the decisions and their reasons
    (gridformer.parallel.auto.cost).
    """

    scheme: Scheme = Field(
        default="single",
        description="The scheme determines how the weights and activations of a model are sharded: "
        f"{_SAID}. Packages can bring others.",
    )
    rows: int = Field(default=1, ge=1, le=MOST_PROCESSES)
    """The device grid has this number of rows (r)."""
    cols: int = Field(default=1, ge=1, le=MOST_PROCESSES)
    """The device grid has this number of columns (c)."""
    branches: int = Field(default=1, ge=1, le=MOST_PROCESSES)
    """For subgraph, attention heads and feed-forward columns are divided among this number of
    sub-grids (g)."""
    dp: int = Field(default=1, ge=1, le=MOST_PROCESSES)
    """The run has this number of data-parallel replicas, or for subgraph this number of processes
    in each sub-grid."""
    dp_mode: Literal["replicate", "zero1", "fsdp"] = "replicate"
    """The mode determines what is sharded over replicas: nothing (replicate), gradients and
    optimizer state (zero1), or also parameters, which are then gathered layer by layer (fsdp)."""
    reshard: Literal["auto", "layer", "step"] = "layer"
    """With fsdp, a layer's gathered parameters are freed after its forward pass and after its
    backward pass (layer), or when the step ends (step). The latter gathers each of them once per
    step and needs memory for all of them. auto keeps them if there is enough memory."""
    shard_over: int = Field(default=0, ge=0, le=MOST_PROCESSES)
    """With zero1 and fsdp, each group of this number of neighboring replicas shards what dp_mode
    says, and the groups hold equal parts, whose gradients are summed across groups. With the
    replicas of a node in a group, parameters are gathered inside nodes. 0 means that all replicas
    are one group."""
    gradient_sync: Literal["step", "micro_batch"] = "step"
    """With zero1 and fsdp and several micro-batches, gradients are summed over replicas in the last
    backward pass of a step (step), until which each device holds those of all its parameters, or in
    every backward pass (micro_batch), which sends them more often and keeps only a replica's
    part."""
    pp: int = Field(default=1, ge=1, le=MOST_PROCESSES)
    """The model is divided over this number of pipeline-parallel ranks."""
    stages_per_rank: int = Field(default=1, ge=1, le=MOST_LAYERS)
    """Each pipeline rank holds this number of stages. More than 1 interleaves them, unless pipeline
    is zbv."""
    pipeline: Literal["auto", "gpipe", "1f1b", "interleaved", "zb_h1", "zbv"] = "auto"
    """The pipeline schedule is the order in which stages process micro-batches. auto means
    interleaved with several stages per rank, gpipe with fewer micro-batches than stages, and 1f1b
    otherwise. zb_h1 is 1f1b whose backward passes leave the gradients of weights for later, when a
    rank would wait. zbv does so with two stages per rank, which lie there and back: the first rank
    holds the first stage and the last one."""
    micro_batches: int = Field(default=1, ge=1, le=MOST_PROCESSES)
    """The batch of each replica is divided into this number of micro-batches (m). They go through
    the model one after the other, and their gradients are accumulated."""
    sequence_parallel: bool = False
    """For megatron, true shards the activations between sections along the sequence. So it does
    for optimus with stationary: weight, whose columns otherwise shard the batch."""
    rows_over: Literal["auto", "batch", "sequence"] = "auto"
    """For megatron_2d and optimus, the rows of the grid divide the sequences of a micro-batch
    (batch), or the tokens of each sequence (sequence), whose attention then gathers keys and values
    over rows or redistributes heads. auto divides the sequences of a micro-batch where their number
    allows it, and otherwise each of them."""
    scatter_gather: bool = True
    """For megatron with a pipeline, all devices of a stage have equal copies of the activations.
    true lets each device send one slice of them, and the next stage gathers the slices; false lets
    each device send its whole copy."""
    schedule: Literal["auto", "broadcast", "pipelined", "gather"] = "auto"
    """For optimus, the schedule determines how the operands of a product are communicated: one
    panel at a time (broadcast), one panel at a time while the next is on its way (pipelined), or
    all panels at once (gather)."""
    stationary: Literal["auto", "output", "input", "weight"] = "auto"
    """For optimus, one matrix of each product stays where it is, and the other two are
    communicated: the result stays (output), the operand does (input), or in all products the weight
    does (weight), which moves less if a micro-batch has few tokens. auto communicates the weight
    with the narrower of the two activations."""
    keep_gathered: Literal["auto", "none", "inputs", "weights", "all"] = "auto"
    """These gathered operands are kept instead of being gathered again: the inputs of a product
    until its backward pass (inputs), its weights until the step ends (weights), both (all), or
    neither (none). auto keeps what saves the most traffic within a share of the memory."""
    common: Literal["all", "first"] = "all"
    """For subgraph, the layers outside branches run on all processes (all, D&SP) or only on the
    first sub-grid (first, D&SP-cSub)."""
    attention: Literal["inside", "outside"] = "inside"
    """For subgraph, the projections of attention run in the branches (inside) or in the common
    layers (outside)."""
    feed_forward: Literal["branched", "common"] = "branched"
    """For subgraph, the feed-forward layers run in the branches (branched) or are common layers
    (common)."""
    order: Literal["topology", "contiguous"] = "topology"
    """For subgraph, neighboring ranks belong to the same segmented collective (topology) or to the
    same sub-grid (contiguous)."""
    experts_over: tuple[Literal["rows", "cols", "branches", "dp"], ...] = ()
    """For models with experts, devices along these axes have different experts, to which tokens
    travel. Along its other axes, the scheme shards the matrices of every expert."""
    experts_dp: int = Field(default=0, ge=0, le=MOST_PROCESSES)
    """With dp in experts_over, each group of this number of neighboring replicas shares the
    experts, and the groups have the same ones. 0 means that all replicas are one group."""
    devices_per_node: int = Field(default=0, ge=0, le=MOST_PROCESSES)
    """Each node has this number of devices, and blocks of the grid are placed on nodes. 0 means
    that ranks are placed in order, row by row."""
    nodes_per_rack: int = Field(default=0, ge=0, le=MOST_PROCESSES)
    """Each rack has this number of nodes, and blocks of nodes are placed in racks. 0 means that
    nodes are placed in order. It needs devices_per_node."""
    cluster: str = ""
    """auto settings are decided by the times of products and messages on this cluster. The value is
    the name of a shipped cluster or the path of a file that gridformer calibrate wrote. The file
    must be the same on all machines of a run. Empty means that volumes and thresholds decide
    them."""

    def _problems(self) -> Iterator[str]:
        if self.n_processes > MOST_PROCESSES:
            axes = ("rows", "cols", "branches", "dp", "pp")
            sizes = " x ".join(f"{axis}={n}" for axis in axes if (n := getattr(self, axis)) > 1)
            yield (f"{sizes} are {self.n_processes:,} processes: use at most {MOST_PROCESSES:,}")

    @property
    def n_processes(self) -> int:
        """The processes of a run, one for each device."""
        return self.rows * self.cols * self.branches * self.dp * self.pp

    @property
    def shards(self) -> int:
        """The replicas over which `dp_mode` shards, if it shards anything."""
        return self.shard_over or self.dp

    @property
    def sequence_rows(self) -> int:
        """The rows of the grid that divide each sequence; 1 if they divide the batch."""
        return self.rows if self.rows_over == "sequence" else 1

    @property
    def n_stages(self) -> int:
        """The pipeline stages of all ranks together."""
        return self.pp * self.stages_per_rank

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The index along `pp` of the rank that holds each stage; with `zbv` they form a V."""
        ranks = [*range(self.pp)]
        return (
            *ranks,
            *(ranks[::-1] if self.pipeline == "zbv" else ranks * (self.stages_per_rank - 1)),
        )

    def stages_on(self, rank: int) -> list[int]:
        """Returns the stages that a rank holds, given its index along `pp`."""
        return [stage for stage, there in enumerate(self.stage_ranks) if there == rank]

    @property
    def splits_backward(self) -> bool:
        """Whether backward passes leave the gradients of weights to passes of their own."""
        return self.pipeline in ("zb_h1", "zbv")

    @property
    def ideal_idle(self) -> float:
        """The idle time of a pipeline relative to computing time, if all passes take equal times.

        A backward pass that is not split takes twice as long as a forward pass.
        """
        idle, m = self.pp - 1, self.micro_batches
        if self.pipeline == "zbv":  # few micro-batches do not fill the V
            idle += max(0, 3 * self.pp - 1 - 2 * m)
        return idle / (self.stages_per_rank * m) / (3 if self.splits_backward else 1)

    @property
    def pipeline_order(self) -> PipelineOrder:
        """`pipeline`, with `auto` resolved."""
        if self.pipeline != "auto":
            return self.pipeline
        if self.stages_per_rank > 1:
            return "interleaved"
        return "1f1b" if self.micro_batches >= self.pp else "gpipe"
