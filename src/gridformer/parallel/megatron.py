"""Megatron: one-dimensional tensor parallelism (Shoeybi et al. 2019), and its sequence-parallel
form (Korthikanti et al. 2022).

A section (attention, feed-forward) opens with weights cut by columns and closes with weights cut
by rows; in between everything is local. This is the grid of one row: products as in Optimus'
`gather` schedule, where the weights are whole already. All that differs is how activations lie
between sections, which is a section's boundary (gridformer.parallel.boundary). Backward, the sum
over the devices where a section was entered travels while the weight's gradient is multiplied.

Sequence parallel: norms, dropout, the embedding's result and the head's input are cut over s.
"""

from __future__ import annotations

from torch import nn

from gridformer.comm import Axes
from gridformer.models import Model, blocks
from gridformer.parallel.boundary import Boundary, Replicated, Sharded
from gridformer.parallel.choices import Choices
from gridformer.parallel.grid import (
    GridLinear,
    GridTiedHead,
    GridTokenEmbedding,
    RowParallelLabelHead,
    Schedules,
    SequenceParallelChosenToken,
    keep_gathered_of,
)
from gridformer.parallel.loss import VocabParallelCrossEntropy
from gridformer.parallel.partitioned import PartitionedActivations
from gridformer.parallel.placement import Placement, place

OPENING_BIAS = Placement(cut=("col",))
HEADS = Placement(cut=(None, "col"))


def apply(model: Model, axes: Axes, choices: Choices, sequence_parallel: bool) -> None:
    """Cut a plain model's weights and put its products on a grid of one row, in place."""
    col = axes.col
    boundary: Boundary = Sharded(col, dim=1) if sequence_parallel else Replicated(col)
    schedules, whole = Schedules(axes, boundary), Schedules(axes, Replicated(col))
    part = (col.index, col.size) if sequence_parallel else (0, 1)
    head, table = choices["head"], keep_gathered_of(choices["head"])
    if not sequence_parallel:
        model.recompute.partition = PartitionedActivations(col)

    def common(child: nn.Module) -> None:
        """Between sections every device holds these; it has seen all tokens, or its part."""
        for name, parameter in list(child.named_parameters(recurse=False)):
            cut = (None,) * parameter.dim()
            place(child, name, Placement(cut, copies="col", partial=sequence_parallel), axes)

    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            match child:
                case blocks.Linear() if child.role.product == "pooler":
                    # Every device has the chosen tokens.
                    choice = choices[child.role.product]
                    setattr(module, name, GridLinear(child, choice, OPENING_BIAS, whole))
                case blocks.Linear() if child.role.section == "head":
                    common(child)
                case blocks.Linear():
                    bias = OPENING_BIAS
                    if not child.role.opens:
                        bias = Placement((None,), copies="col", partial=sequence_parallel)
                    choice = choices[child.role.product]
                    setattr(module, name, GridLinear(child, choice, bias, schedules))
                case blocks.LayerNorm() | blocks.RMSNorm():
                    common(child)
                case blocks.TokenEmbedding():
                    setattr(module, name, GridTokenEmbedding(child, head, table, schedules))
                case blocks.PositionEmbedding() | blocks.SegmentEmbedding():
                    common(child)
                    child.part = part
                case blocks.SinusoidalPositions():
                    child.part = part
                case blocks.RelativeBias():
                    place(child, "weight", HEADS, axes)
                case blocks.TiedHead():
                    setattr(module, name, GridTiedHead(child, head, table, schedules))
                case blocks.LabelHead():
                    setattr(module, name, RowParallelLabelHead(child, None, axes))
                case blocks.ChosenToken() if sequence_parallel:
                    setattr(module, name, SequenceParallelChosenToken(axes))
                case blocks.CrossEntropy():
                    cut = VocabParallelCrossEntropy(col, model.config.vocab_size, child.smoothing)
                    setattr(module, name, cut)
                case blocks.Dropout() if sequence_parallel:
                    child.block = (col.index, 0)
                case blocks.Attention() | blocks.CrossAttention():
                    child.head_block = col.index
