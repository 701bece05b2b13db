"""The section of a run that says how a model is spread over processes."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from gridformer.config.base import Config

Scheme = Literal["single", "megatron", "megatron_2d", "optimus", "subgraph"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)  # described in gridformer.parallel.registry
PipelineOrder = Literal["gpipe", "1f1b", "interleaved"]


class LayoutConfig(Config):
    """How a model is spread over processes: a scheme on a rows x cols grid, times dp, times pp.

    `scheme=subgraph` has `branches` sub-grids of dp processes each in the place of the grid.

    `schedule`, `stationary` and `keep_gathered` say how products communicate; `auto` decides for
    each product from message sizes and memory, and `gridformer train --explain` prints what and
    why (gridformer.parallel.auto.cost).
    """

    scheme: Scheme = "single"
    rows: int = Field(default=1, ge=1)
    cols: int = Field(default=1, ge=1)
    branches: int = Field(
        default=1, ge=1, description="subgraph: g, sub-grids that share heads and feed-forward"
    )
    dp: int = Field(default=1, ge=1)
    dp_mode: Literal["replicate", "zero1", "fsdp"] = Field(
        default="replicate",
        description="what replicas hold alike: everything; all but the optimizer's state; nothing, "
        "parameters being gathered layer by layer",
    )
    pp: int = Field(default=1, ge=1, description="ranks that hold successive stages of layers")
    stages_per_rank: int = Field(default=1, ge=1, description="more than 1 interleaves them")
    pipeline: Literal["auto", "gpipe", "1f1b", "interleaved"] = Field(
        default="auto",
        description="in which order stages go through micro-batches; auto: interleaved where ranks "
        "have several, else 1f1b, or gpipe where there are fewer micro-batches than stages",
    )
    micro_batches: int = Field(
        default=1,
        ge=1,
        description="m: parts of a step's batch that go through the model one after the other",
    )
    sequence_parallel: bool = False
    schedule: Literal["auto", "broadcast", "pipelined", "gather"] = Field(
        default="auto",
        description="optimus: a panel at a time, the same with the next on its way, or all at once",
    )
    stationary: Literal["auto", "output", "input"] = Field(
        default="auto", description="optimus: which activation of a product does not travel"
    )
    keep_gathered: Literal["auto", "none", "inputs", "weights", "all"] = Field(
        default="auto",
        description="what is kept instead of gathered again: a product's input until its backward "
        "pass, its weight until the step ends",
    )
    common: Literal["all", "first"] = Field(
        default="all",
        description="subgraph: layers outside branches on all processes (D&SP), or on the first "
        "sub-grid alone (D&SP-cSub)",
    )
    attention: Literal["inside", "outside"] = Field(
        default="inside",
        description="subgraph: projections of q, k, v and of the result in the branches, or common",
    )
    feed_forward: Literal["branched", "common"] = "branched"
    order: Literal["topology", "contiguous"] = Field(
        default="topology",
        description="subgraph: neighboring ranks are of one segmented collective, or of one "
        "sub-grid",
    )
    devices_per_node: int = Field(
        default=0, ge=0, description="places blocks of the grid on nodes; 0 places rows in order"
    )

    @property
    def n_processes(self) -> int:
        return self.rows * self.cols * self.branches * self.dp * self.pp

    @property
    def n_stages(self) -> int:
        return self.pp * self.stages_per_rank

    @property
    def pipeline_order(self) -> PipelineOrder:
        """`pipeline`, with `auto` resolved."""
        if self.pipeline != "auto":
            return self.pipeline
        if self.stages_per_rank > 1:
            return "interleaved"
        return "1f1b" if self.micro_batches >= self.pp else "gpipe"
