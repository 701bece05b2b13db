"""Walks over the modules of a plain model and replaces them by a scheme's parallel modules."""

from __future__ import annotations

from torch import nn

from gridformer.mesh import Axes
from gridformer.models import Model, blocks
from gridformer.parallel.scheme import ModuleTable
from gridformer.parallel.sharding import is_sharded, shard_parameter

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
    """Replaces the modules of a plain model as a scheme's table says, and places all parameters.

    Args:
        model: The plain model, whose modules are replaced in place.
        table: The table of the scheme.
        axes: The axes of this process.
    """
    if table.partition is not None:
        model.recompute.partition = table.partition
    model.recompute.stops_early = table.stops_early
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            replace = table.roles.get(role_of(child) or "")
            parallel = replace(child) if replace else None
            if parallel is not None:
                setattr(module, name, parallel)
    if table.rest is None:
        return
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not is_sharded(parameter):
                shard_parameter(module, name, table.rest(parameter), axes)
