"""From a plain model and a layout to the modules and parameters that one device holds."""

from __future__ import annotations

from functools import partial

import torch

from gridformer.config import LayoutConfig, ModelConfig
from gridformer.mesh import Axes
from gridformer.models import FAMILIES, Model, build_model
from gridformer.parallel import pipeline
from gridformer.parallel.auto.cost import Choices
from gridformer.parallel.auto.heuristics import decide
from gridformer.parallel.data import fsdp
from gridformer.parallel.data.zero import cut_over_replicas
from gridformer.parallel.initialization import initialize
from gridformer.parallel.registry import spec_of
from gridformer.parallel.walk import apply_table

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

    choices: how each product is carried out, from `gridformer.parallel.auto.heuristics.decide`,
    which is asked if there are none. Parameter names never change. The result is unallocated:
    `initialize` fills it.

    Raises TypeError for any other network, and says what can be cut of that.
    """
    if not isinstance(model, Model):
        raise TypeError(
            f"gridformer.parallel.parallelize cuts the models of gridformer.models "
            f"({', '.join(FAMILIES)}), not a {type(model).__name__}: build one with "
            "build_parallel, or put the branches of your own network into "
            "gridformer.models.branches.Branches and call "
            "gridformer.parallel.branches.parallelize_branches(network, g)"
        )
    choices = choices or decide(model.config, layout)
    table = spec_of(layout).table(model, axes, choices, layout)
    if table is not None:
        apply_table(model, table, axes)
    return model


def build_parallel(
    config: ModelConfig,
    layout: LayoutConfig,
    axes: Axes,
    seed: int,
    device: torch.device,
    dtype: str = "float32",
    choices: Choices | None = None,
    filled: bool = True,
) -> Model:
    """This device's part of a freshly initialized model: of its own pipeline stages, if there are
    several.

    dtype: `float32`, `float64`; `bfloat16` or `float16` (activations; parameters stay float32).
    choices: see `parallelize`. filled: whether parameters get their first values; without, they are
    0, for whoever overwrites them next.
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
    initialize(model, seed, device, PARAMETER_DTYPE[dtype], cut, filled)
    if layout.dp_mode == "fsdp":
        fsdp.install(model, axes)
    model.clock.seed = seed
    model.compute_dtype = getattr(torch, dtype)
    return model
