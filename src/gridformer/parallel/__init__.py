"""Parallel schemes, applied to plain models from outside.

| scheme            | weights          | between sections     | enter, leave                     |
|-------------------|------------------|----------------------|----------------------------------|
| single            | whole            | nothing cut          | -                                |
| megatron          | cut over col     | nothing cut          | identity, all-reduce             |
| sequence parallel | cut over col     | s over col           | all-gather, reduce-scatter of s  |
| optimus, gather   | cut over row, col| b over row, h: col   | all-gather, reduce-scatter of h  |
| optimus, panels   | cut over row, col| b over row, h: col   | SUMMA products panel by panel    |
| SUPER, D&SP       | cut over branch  | b over branch        | all-gather, reduce-scatter of b  |
| SUPER, D&SP-cSub  | cut over branch  | on the first branch  | broadcast, reduce                |

Each composes with replicas (dp), which may share out what they would all hold
(gridformer.parallel.sharding), and with pipelines (pp, gridformer.parallel.pipeline): a rank then
holds the layers of its own stages, cut as its scheme says.
"""

from __future__ import annotations

from functools import partial

import torch

from gridformer.comm import Axes
from gridformer.config import LayoutConfig, ModelConfig
from gridformer.models import FAMILIES, Model, build_model
from gridformer.parallel import fsdp, megatron, optimus, pipeline, subgraph
from gridformer.parallel.choices import Choices
from gridformer.parallel.initialise import initialise
from gridformer.parallel.rules import decide
from gridformer.parallel.sharding import cut_over_replicas

__all__ = ["build_parallel", "initialise", "parallelize"]

PARAMETER_DTYPE = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.float32,
    "float16": torch.float32,
}


def parallelize(
    model: Model, layout: LayoutConfig, axes: Axes, choices: Choices | None = None
) -> Model:
    """Cut a plain model (on the meta device) as `layout` says, in place; returns it.

    choices: how each product is carried out, from `gridformer.parallel.rules.decide`, which is
    asked if there are none. Parameter names never change. The result is unallocated: `initialise`
    fills it.

    Raises TypeError for any other network, and says what can be cut of that.
    """
    if not isinstance(model, Model):
        raise TypeError(
            f"gridformer.parallel.parallelize cuts the models of gridformer.models "
            f"({', '.join(FAMILIES)}), not a {type(model).__name__}: build one with "
            "build_parallel, or put the branches of your own network into "
            "gridformer.models.branches.Branches and call "
            "gridformer.parallel.subgraph.parallelize(network, g)"
        )
    choices = choices or decide(model.config, layout)
    match layout.scheme:
        case "megatron":
            megatron.apply(model, axes, choices, layout.sequence_parallel)
        case "optimus":
            optimus.apply(model, axes, choices)
        case "subgraph":
            subgraph.apply(model, axes, choices, layout)
        case "single":
            pass
    return model


def build_parallel(
    config: ModelConfig,
    layout: LayoutConfig,
    axes: Axes,
    seed: int,
    device: torch.device,
    dtype: str = "float32",
    choices: Choices | None = None,
) -> Model:
    """This device's part of a freshly initialised model: of its own pipeline stages, if there are
    several.

    dtype: `float32`, `float64`; `bfloat16` or `float16` (activations; parameters stay float32).
    choices: see `parallelize`.
    """
    with torch.device("meta"):
        model = build_model(config)
    choices = choices or decide(config, layout)
    if layout.pp > 1:
        stages = pipeline.stages_of(config, layout.n_stages, choices.work)
        pipeline.keep_stages(model, stages, axes)
    parallelize(model, layout, axes, choices)
    if layout.pp > 1:
        pipeline.mark_shared(model, axes)
    cut = partial(cut_over_replicas, axes=axes, mode=layout.dp_mode)
    initialise(model, seed, device, PARAMETER_DTYPE[dtype], cut)
    if layout.dp_mode == "fsdp":
        fsdp.install(model, axes)
    model.clock.seed = seed
    model.compute_dtype = getattr(torch, dtype)
    return model
