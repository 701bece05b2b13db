"""Optimus: two-dimensional tensor parallelism on an r x c grid (Xu, Li, Gong, You 2021).

Activations [b, s, h] are cut b over rows and h over columns; weights are cut both ways. Every
product is a SUMMA product, attention is local (a device holds b/r sequences and n/c heads, all s).
A norm adds up its statistics along a row, unless the product that reads it gathers whole rows: then
these are normalized, and the norm sends nothing.
"""

from __future__ import annotations

from gridformer.comm import Axes
from gridformer.models import Model, blocks
from gridformer.parallel.boundary import Sharded
from gridformer.parallel.choices import Choices
from gridformer.parallel.grid import (
    GridLinear,
    GridTiedHead,
    GridTokenEmbedding,
    RowParallelLabelHead,
    Schedules,
    keep_gathered_of,
)
from gridformer.parallel.loss import VocabParallelCrossEntropy
from gridformer.parallel.norms import VECTOR, DeferredNorm, grid_norm
from gridformer.parallel.placement import Placement, place

# Tables that are looked up locally, positions and biases of scores, lie over the columns, too: they
# are small, and no device needs another's columns of them.
TABLE = Placement(cut=(None, "col"), copies="row", partial=True)


def apply(model: Model, axes: Axes, choices: Choices) -> None:
    """Replace a plain model's modules by their grid forms, in place."""
    schedules = Schedules(axes, Sharded(axes.col, dim=-1))
    head, table = choices["head"], keep_gathered_of(choices["head"])
    inside = {name for name, choice in choices.products.items() if choice.norm_inside}
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            match child:
                case blocks.Linear():
                    choice = choices[child.role.product]
                    setattr(module, name, GridLinear(child, choice, VECTOR, schedules))
                case blocks.LayerNorm() | blocks.RMSNorm() if child.reader in inside:
                    setattr(module, name, DeferredNorm(child, axes))
                case blocks.LayerNorm() | blocks.RMSNorm():
                    setattr(module, name, grid_norm(child, axes))
                case blocks.TokenEmbedding():
                    setattr(module, name, GridTokenEmbedding(child, head, table, schedules))
                case blocks.PositionEmbedding() | blocks.SegmentEmbedding() | blocks.RelativeBias():
                    place(child, "weight", TABLE, axes)
                case blocks.SinusoidalPositions():
                    child.columns = (axes.col.index, axes.col.size)
                case blocks.TiedHead():
                    setattr(module, name, GridTiedHead(child, head, table, schedules))
                case blocks.LabelHead():
                    setattr(module, name, RowParallelLabelHead(child, "row", axes))
                case blocks.CrossEntropy():
                    cut = VocabParallelCrossEntropy(
                        axes.col, model.config.vocab_size, child.smoothing
                    )
                    setattr(module, name, cut)
                case blocks.Dropout():
                    child.block = (0, axes.col.index)
                case blocks.Attention() | blocks.CrossAttention():
                    child.head_block = axes.col.index
