"""Megatron: one-dimensional tensor parallelism (Shoeybi et al. 2019), and its sequence-parallel
form (Korthikanti et al. 2022).

A section (attention, feed-forward) opens with weights cut by columns and closes with weights cut
by rows; in between everything is local. This is the grid of one row: products as in Optimus'
`gather` schedule, where the weights are whole already. All that differs is how activations lie
between sections, which is a section's two ends (gridformer.parallel.ends). Backward, the sum over
the devices where a section was entered travels while the weight's gradient is multiplied.

Sequence parallel: norms, dropout, the embedding's result and the head's input are cut over s.
"""

from __future__ import annotations

from torch import Tensor, nn

from gridformer.comm import Axes
from gridformer.models import blocks
from gridformer.models.gpt2 import GPT2
from gridformer.parallel.choices import Choices
from gridformer.parallel.ends import Cut, End, Replicated
from gridformer.parallel.grid import (
    CutChosenToken,
    CutLabelHead,
    GridLinear,
    GridTiedHead,
    GridTokenEmbedding,
    Schedules,
    keep_of,
)
from gridformer.parallel.loss import CutCrossEntropy
from gridformer.parallel.placement import Placement, place

OPENING_BIAS = Placement(cut=("col",))


class CutPositionEmbedding(nn.Module):
    """The positions of this rank's part of the sequence."""

    def __init__(self, plain: blocks.PositionEmbedding, axes: Axes) -> None:
        super().__init__()
        self.col = axes.col
        self.weight = plain.weight
        place(self, "weight", Placement(cut=(None, None), copies="col", partial=True), axes)

    def forward(self, s: int, start: int = 0) -> Tensor:
        part = s // self.col.size
        first = start + self.col.index * part
        return self.weight[first : first + part]


def apply(model: GPT2, axes: Axes, choices: Choices, sequence_parallel: bool) -> None:
    """Cut a plain model's weights and put its products on a grid of one row, in place."""
    col = axes.col
    end: End = Cut(col, dim=1) if sequence_parallel else Replicated(col)
    schedules, whole = Schedules(axes, end), Schedules(axes, Replicated(col))
    # Between sections every device holds these; it has seen all tokens, or its part of them.
    vector = Placement(cut=(None,), copies="col", partial=sequence_parallel)
    positions = Placement(cut=(None, None), copies="col", partial=sequence_parallel)
    head, table = choices["head"], keep_of(choices["head"])
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            match child:
                case blocks.Linear() if name == "pooler":  # every device has the chosen tokens
                    linear = GridLinear(child, choices[name], OPENING_BIAS, whole)
                    setattr(module, name, linear)
                case blocks.Linear():
                    bias = OPENING_BIAS if child.opens else vector
                    setattr(module, name, GridLinear(child, choices[name], bias, schedules))
                case blocks.LayerNorm():
                    place(child, "weight", vector, axes)
                    place(child, "bias", vector, axes)
                case blocks.TokenEmbedding():
                    setattr(module, name, GridTokenEmbedding(child, head, table, schedules))
                case blocks.PositionEmbedding() if sequence_parallel:
                    setattr(module, name, CutPositionEmbedding(child, axes))
                case blocks.PositionEmbedding():
                    place(child, "weight", positions, axes)
                case blocks.TiedHead():
                    setattr(module, name, GridTiedHead(head, table, schedules))
                case blocks.LabelHead():
                    setattr(module, name, CutLabelHead(child, None, axes))
                case blocks.ChosenToken() if sequence_parallel:
                    setattr(module, name, CutChosenToken(axes))
                case blocks.CrossEntropy():
                    cut = CutCrossEntropy(col, model.config.vocab_size)
                    setattr(module, name, cut)
                case blocks.Dropout() if sequence_parallel:
                    child.block = (col.index, 0)
                case blocks.Attention():
                    child.head_block = col.index
