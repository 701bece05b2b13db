"""Megatron: one-dimensional tensor parallelism (Shoeybi et al. 2019), and its sequence-parallel
form (Korthikanti et al. 2022).

A section (attention, feed-forward) opens with weights cut by columns and closes with weights cut
by rows; in between everything is local. The products are the plain ones. All that changes are the
section's two ends:

    form               between sections    enter                         leave
    plain              nothing cut         identity / all-reduce         all-reduce / identity
    sequence parallel  s cut               all-gather / reduce-scatter   reduce-scatter / all-gather

(forward / backward). The closing product's bias lies on column 0 alone, which adds it to its
partial sum: one owner, and no division by c.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gridformer.comm import Axes, Axis, autograd
from gridformer.models import blocks
from gridformer.models.gpt2 import GPT2
from gridformer.parallel.loss import CutCrossEntropy
from gridformer.parallel.placement import WHOLE_1D, Placement, place, vocabulary_multiple

End = Callable[[Tensor], Tensor]

OPENING_WEIGHT = Placement(cut=(None, "col"))
OPENING_BIAS = Placement(cut=("col",))
CLOSING_WEIGHT = Placement(cut=("col", None))


@dataclass(frozen=True)
class Ends:
    """How a section is entered and left, and what that means for what lies between sections."""

    enter: End
    leave: End
    cuts_sequence: bool


def plain_ends(col: Axis) -> Ends:
    """Activations between sections are whole on every device."""
    return Ends(
        enter=lambda x: autograd.identity_allreduce(x, col),
        leave=lambda x: autograd.allreduce_identity(x, col),
        cuts_sequence=False,
    )


def sequence_ends(col: Axis) -> Ends:
    """Activations [b, s, h] between sections are cut over s: 1/c of the memory, same volume."""
    return Ends(
        enter=lambda x: autograd.allgather_reducescatter(x, col, dim=1),
        leave=lambda x: autograd.reducescatter_allgather(x, col, dim=1),
        cuts_sequence=True,
    )


class CutTokenEmbedding(nn.Module):
    """The rows of one range of the vocabulary: zero for tokens of other ranges, so ranks add up."""

    def __init__(self, plain: blocks.TokenEmbedding, axes: Axes) -> None:
        super().__init__()
        self.weight = plain.weight
        pad = vocabulary_multiple(axes)
        place(self, "weight", Placement(cut=("col", None), pad=pad), axes)
        self.first = axes.col.index * self.weight.shape[0]

    def forward(self, tokens_BS: Tensor) -> Tensor:
        local = tokens_BS - self.first
        here = (local >= 0) & (local < self.weight.shape[0])
        rows = nn.functional.embedding(torch.where(here, local, 0), self.weight)
        return rows * here.unsqueeze(-1).to(rows.dtype)


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


def apply(model: GPT2, axes: Axes, sequence_parallel: bool) -> None:
    """Cut a plain model's weights and attach the sections' ends, in place."""
    col = axes.col
    ends = sequence_ends(col) if sequence_parallel else plain_ends(col)
    vector = Placement(cut=(None,), copies="col", partial=ends.cuts_sequence)
    table = Placement(cut=(None, None), copies="col", partial=ends.cuts_sequence)
    for module in list(model.modules()):
        match module:
            case blocks.Linear():
                _cut_linear(module, axes)
            case blocks.LayerNorm():
                place(module, "weight", vector, axes)
                place(module, "bias", vector, axes)
            case blocks.Attention():
                module.head_block = col.index
                _attach(module, ends.enter, ends.leave)
            case blocks.FeedForward():
                _attach(module, ends.enter, ends.leave)
            case blocks.TiedHead():
                _attach(module, ends.enter, None)
            case blocks.Dropout() if ends.cuts_sequence:
                module.block = (col.index, 0)
    model.tokens = CutTokenEmbedding(model.tokens, axes)  # type: ignore[assignment]
    _attach(model.tokens, None, ends.leave)
    if ends.cuts_sequence:
        model.positions = CutPositionEmbedding(model.positions, axes)  # type: ignore[assignment]
    else:
        place(model.positions, "weight", table, axes)
    model.loss = CutCrossEntropy(col, model.config.vocab_size)  # type: ignore[assignment]


def _cut_linear(linear: blocks.Linear, axes: Axes) -> None:
    if linear.opens:
        place(linear, "weight", OPENING_WEIGHT, axes)
        if linear.bias is not None:
            place(linear, "bias", OPENING_BIAS, axes)
        return
    place(linear, "weight", CLOSING_WEIGHT, axes)
    if axes.col.index == 0 and linear.bias is not None:
        place(linear, "bias", WHOLE_1D, axes)
    else:
        linear.bias = None


def _attach(module: nn.Module, enter: End | None, leave: End | None) -> None:
    """Run `enter` on a module's first input and `leave` on its output. Names stay as they are."""
    if enter is not None:
        first = enter
        module.register_forward_pre_hook(lambda _, args: (first(args[0]), *args[1:]))
    if leave is not None:
        last = leave

        def hook(_: nn.Module, args: Any, out: Tensor) -> Tensor:
            return last(out)

        module.register_forward_hook(hook)
