"""Builds the modules and parameters that one device holds from a plain model and a layout."""

from __future__ import annotations

from functools import partial

import torch

from gridformer.config import LayoutConfig, ModelConfig
from gridformer.mesh import Axes
from gridformer.models import FAMILIES, Model, build_model
from gridformer.models.blocks import attach_copies, attach_gradient_slots
from gridformer.models.held_layers import only_layers
from gridformer.parallel import pipeline
from gridformer.parallel.auto.cost import Choices
from gridformer.parallel.auto.heuristics import decide
from gridformer.parallel.axes import split_heads
from gridformer.parallel.data import fsdp
from gridformer.parallel.data.zero import cut_over_replicas, reserve_padding
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
    """Shards a plain model as `layout` says, in place. Parameter names never change.

    Args:
        model: A plain model of gridformer.models on the meta device.
        layout: The validated layout.
        axes: The axes of this process, see `gridformer.parallel.axes.build_axes`.
        choices: How each product is carried out; None asks
            `gridformer.parallel.auto.heuristics.decide`.

    Returns:
        The same model with parallel modules. Its parameters are not allocated: `initialize` does
        that.

    Raises:
        TypeError: `model` is another kind of network. The message says how to shard that.
    """
    if not isinstance(model, Model):
        raise TypeError(
            f"gridformer.parallel.parallelize supports the models of gridformer.models "
            f"({', '.join(FAMILIES)}), not a {type(model).__name__}: build one with "
            "build_parallel, or put the branches of your own network into "
            "gridformer.models.branches.Branches and call "
            "gridformer.parallel.branches.parallelize_branches(network, g)"
        )
    choices = choices or decide(model.config, layout)
    split_heads(model.config, layout, axes)
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
    """Builds this device's part of a newly initialized model.

    Args:
        config: The model.
        layout: The validated layout. With a pipeline, only the rank's own stages are built.
        axes: The axes of this process, see `gridformer.parallel.axes.build_axes`.
        seed: Seed of the initial values, which depend on it and the parameter's name alone.
        device: Where parameters are allocated.
        dtype: `float32`, `float64`, `bfloat16` or `float16`. With the last two only activations
            have that dtype; parameters stay float32.
        choices: See `parallelize`.
        filled: Whether parameters get their initial values. Otherwise they are 0, for callers that
            overwrite them.
    """
    choices = choices or decide(config, layout)
    with torch.device("meta"):
        if layout.pp > 1:
            stages = pipeline.stages_of(config, layout.n_stages, choices.work)
            with only_layers(pipeline.modules_of(config, stages, axes)):
                model = build_model(config)
            pipeline.keep_stages(model, stages, axes)
        else:
            model = build_model(config)
    parallelize(model, layout, axes, choices)
    if layout.pp > 1:
        pipeline.mark_shared(model, axes)
    cut = partial(cut_over_replicas, axes=axes, mode=layout.dp_mode)
    initialize(model, seed, device, PARAMETER_DTYPE[dtype], cut, filled)
    attach_copies(model, getattr(torch, dtype), choices.cast_once)
    attach_gradient_slots(model)
    reserve_padding(model.parameters(), axes)
    model.dropout_rng.seed, model.dropout_rng.device = seed, device
    model.dropout_rng.sites = model.sites()
    model.compute_dtype = getattr(torch, dtype)
    if layout.dp_mode == "fsdp":
        fsdp.install_gathering(model, axes, reshards=choices.reshard == "layer")
    if layout.stages_per_rank > 1:
        pipeline.prefetch_within_stages(model)
    return model
