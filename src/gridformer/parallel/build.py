"""Builds the modules and parameters that one device holds from a plain model and a layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from gridformer.config import LayoutConfig, ModelConfig
from gridformer.mesh import Axes
from gridformer.models import FAMILIES, Model, NetworkModel, blocks, build_model
from gridformer.models.blocks import Init, attach_copies, attach_gradient_slots
from gridformer.models.model import only_layers
from gridformer.parallel import pipeline
from gridformer.parallel.auto.cost import Choices
from gridformer.parallel.auto.heuristics import decide
from gridformer.parallel.axes import split_heads
from gridformer.parallel.data import fsdp
from gridformer.parallel.data.zero import cut_over_replicas, reserve_padding
from gridformer.parallel.registry import spec_of
from gridformer.parallel.scheme import ModuleTable
from gridformer.parallel.sharding import (
    ParamPlacement,
    info_of,
    is_sharded,
    set_info,
    shard_parameter,
)
from gridformer.parallel.tensor.sequence import GatheringRows
from gridformer.utils import rng

PARAMETER_DTYPE = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.float32,
    "float16": torch.float32,
}

_CHUNK = 1 << 20  # elements filled at a time, so that the float64 workspace stays small


def parallelize(
    model: Model, layout: LayoutConfig, axes: Axes, choices: Choices | None = None
) -> Model:
    """Shards a plain model, on the meta device, as `layout` says, in place.

    Parameter names never change. The parameters are not allocated: `initialize` does that.

    Raises:
        TypeError: `model` is another kind of network. The message says how to shard that.
    """
    if not isinstance(model, Model):
        raise TypeError(
            f"gridformer.parallel.parallelize supports the models of gridformer.models "
            f"({', '.join(FAMILIES)}), not a {type(model).__name__}: build one with "
            "build_parallel, shard yours by a plan with gridformer.parallelize, or put its "
            "branches into gridformer.models.branches.Branches and call "
            "gridformer.parallel.branches.parallelize_branches(network, g)"
        )
    choices = choices or decide(model.config, layout)
    if isinstance(model, NetworkModel):
        from gridformer.parallel.network.replacing import shard_model

        model.sharding = shard_model(model, layout, axes)
    else:
        split_heads(model.config, layout, axes)
        table = spec_of(layout).table(model, axes, choices, layout)
        if model.balance is not None and layout.n_processes > 1:
            role = {"mixture": spec_of(layout).mixture(axes, layout)}
            table = table or ModuleTable({})
            table = replace(table, roles={**role, **table.roles})
        if table is not None:
            apply_table(model, table, axes)
    if axes.sequence.size > 1:
        model.reads_tokens(GatheringRows.over(axes.sequence, choices.heads_over_rows))
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
        layout: The validated layout. With a pipeline, only the rank's own stages are built.
        seed: Seed of the initial values, which depend on it and the parameter's name alone.
        dtype: `float32`, `float64`, `bfloat16` or `float16`. With the last two only activations
            have that dtype; parameters stay float32.
        filled: Whether parameters get their initial values. Otherwise they are 0, for callers that
            overwrite them.
    """
    choices = choices or decide(config, layout)
    with torch.device("meta"):
        if layout.pp > 1:
            stages = pipeline.stages_of(config, layout.n_stages, choices.work)
            with only_layers(pipeline.modules_of(config, layout, stages, axes)):
                model = build_model(config)
            pipeline.keep_stages(model, layout, stages, axes)
        else:
            model = build_model(config)
    parallelize(model, layout, axes, choices)
    if layout.pp > 1:
        pipeline.mark_shared(model, layout)
    cut = partial(cut_over_replicas, axes=axes, mode=layout.dp_mode)
    if isinstance(model, NetworkModel):
        model.fill_buffers(device)
    values = model.initial_values(seed) if isinstance(model, NetworkModel) and filled else None
    initialize(model, seed, device, PARAMETER_DTYPE[dtype], cut, filled, values)
    if isinstance(model, NetworkModel):
        model.sharding.finish(model)
    attach_copies(model, getattr(torch, dtype), choices.cast_once)
    attach_gradient_slots(model)
    reserve_padding(model.parameters(), axes)
    model.dropout_rng.seed, model.dropout_rng.device = seed, device
    model.dropout_rng.sites = model.sites()
    model.compute_dtype = getattr(torch, dtype)
    if layout.dp_mode == "fsdp":
        reshards = choices.reshard == "layer"
        model.gathering = fsdp.Gathering(model, axes, reshards)  # type: ignore[assignment]
    if layout.stages_per_rank > 1:
        pipeline.prefetch_within_stages(model)
    return model


_ROLES: dict[type[nn.Module], str] = {
    blocks.LayerNorm: "norm",
    blocks.RMSNorm: "norm",
    blocks.HeadNorm: "head_norm",
    blocks.TokenEmbedding: "token_embedding",
    blocks.PositionEmbedding: "positions",
    blocks.SinusoidalPositions: "sinusoidal_positions",
    blocks.SegmentEmbedding: "segments",
    blocks.RelativeBias: "relative_bias",
    blocks.Attention: "attention",
    blocks.CrossAttention: "attention",
    blocks.PaddingMask: "padding_mask",
    blocks.AttendingRows: "attending_rows",
    blocks.FeedForward: "feed_forward",
    blocks.GatedFeedForward: "feed_forward",
    blocks.MixtureOfExperts: "mixture",
    blocks.PooledDropout: "pooled_dropout",  # before its base class
    blocks.Dropout: "dropout",
    blocks.TiedHead: "tied_head",
    blocks.TokenHead: "token_head",  # before its base class
    blocks.LabelHead: "label_head",
    blocks.SpanHead: "span_head",
    blocks.WholeSequence: "whole_sequence",
    blocks.ChosenToken: "chosen_token",
    blocks.Classifier: "classifier",
    blocks.LastTokenClassifier: "classifier",
    blocks.CrossEntropy: "cross_entropy",
    blocks.LabelLoss: "label_loss",
}


def role_of(module: nn.Module) -> str | None:
    """Returns the role of a plain module in its model; None if no scheme replaces such modules.

    The product that opens a section is `opening`, the one that closes it `closing`. A product of a
    head has its own name as role: `pooler` or `transform`.
    """
    if isinstance(module, blocks.Linear | blocks.MergedLinear):
        if module.role.section == "head":
            return module.role.product
        return "opening" if module.role.opens else "closing"
    return next((role for kind, role in _ROLES.items() if isinstance(module, kind)), None)


def apply_table(model: Model, table: ModuleTable, axes: Axes) -> None:
    """Replaces the modules of a plain model as a scheme's table says, and places all parameters."""
    if table.partition is not None:
        model.recompute.partition = table.partition
    model.recompute.stops_early = table.stops_early
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            change = table.roles.get(role_of(child) or "")
            if isinstance(change, ParamPlacement):
                shard_parameter(child, "weight", change, axes)
            elif change and (parallel := change(child)) is not None:
                setattr(module, name, parallel)
    if table.rest is None:
        return
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not is_sharded(parameter):
                shard_parameter(module, name, table.rest(parameter), axes)


def initialize(
    model: nn.Module,
    seed: int,
    device: torch.device,
    dtype: torch.dtype | None,
    cut: Callable[[nn.Parameter], None] | None = None,
    filled: bool = True,
    values: Callable[[str], Tensor] | None = None,
) -> None:
    """Replaces every parameter of a model by one that is allocated and initialized, in place.

    Args:
        cut: Called with each parameter as soon as it is initialized. The memory that it frees
            (gridformer.parallel.data.zero) is thus never allocated for two parameters at once.
        filled: Whether parameters get their initial values. Otherwise they are 0.
        values: Returns the whole value of a parameter by its name, in place of its `Init`. Its type
            is that of the parameter if `dtype` is None.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        module_name, _, leaf = name.rpartition(".")
        if parameter in made:  # several modules share it
            setattr(model.get_submodule(module_name), leaf, made[parameter])
            continue
        info = info_of(parameter)
        shard, init = info.shard, info.init
        whole = values(name) if values and filled else None
        shape = parameter.shape[::-1] if shard.transposed else parameter.shape
        local = torch.zeros(shape, dtype=dtype or parameter.dtype, device=device)
        local = local.t() if shard.transposed else local
        if whole is not None:
            local.copy_(shard.block_of(whole, local.shape))
        elif filled:
            assert init is not None, f"{name} has no Init: use models.blocks.new_parameter"
            _fill(shard.valid(local), init, rng.key(seed, name), shard.offset)
        ours = set_info(nn.Parameter(local, requires_grad=parameter.requires_grad), info)
        made[parameter] = ours
        setattr(model.get_submodule(module_name), leaf, ours)
        if cut is not None:
            cut(ours)


def _fill(part: Tensor, init: Init, key: int, offset: tuple[int, ...]) -> None:
    """Fills the block that begins at the global index `offset`.

    It belongs to a vector, a matrix, or matrices of experts, each of which has a key of its own.
    """
    if init.std == 0.0 or part.numel() == 0:
        part.fill_(init.mean)
        return
    if part.dim() == 3:
        for expert, matrix in enumerate(part, offset[0]):
            _fill(matrix, init, rng.key(key, str(expert)), offset[1:])
        return
    rows = part if part.dim() == 2 else part.unsqueeze(0)
    first_row, first_col = offset if part.dim() == 2 else (0, offset[0])
    cols = torch.arange(first_col, first_col + rows.shape[1], device=part.device)
    std: float | Tensor
    if isinstance(init.std, tuple):
        stds = torch.tensor(init.std, dtype=torch.float64, device=part.device)
        std = stds[cols // init.width % len(stds)]
    else:
        std = init.std
    step = max(1, _CHUNK // rows.shape[1])
    for start in range(0, rows.shape[0], step):
        chunk = rows[start : start + step]
        index = torch.arange(first_row + start, first_row + start + len(chunk), device=part.device)
        chunk.copy_(rng.normal(key, index, cols).mul_(std).add_(init.mean))
