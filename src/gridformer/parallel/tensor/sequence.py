"""Sequences that are divided over devices: rows of a grid, columns, or both.

Rows (`layout.rows_over: sequence`) have two chunks of every sequence each
(gridformer.models.blocks.sequence), and columns contiguous parts of these tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gridformer.comm import autograd
from gridformer.mesh import Axes, Axis
from gridformer.models.blocks import SequenceRows

LABEL = "attention"


def tokens_of(axes: Axes, over_columns: bool) -> SequenceRows:
    """Returns which tokens of every sequence this device has between sections."""
    rows, col = axes.sequence, axes.col
    return SequenceRows(rows.index, rows.size, (col.index, col.size) if over_columns else (0, 1))


@dataclass(frozen=True)
class GatheringRows(SequenceRows):
    """Gathers keys and values over rows: forward all-gather on s, backward reduce-scatter on s.

    With `by_heads` it redistributes heads, as DeepSpeed-Ulysses does (Jacobs et al. 2023): forward
    and backward all-to-alls from tokens to heads and back.

    The messages of all chunks are started at once. A chunk of heads thus travels while attention to
    the earlier ones is computed, and its gradients while attention to the others runs backward. If
    there is one chunk, attention waits for it.
    """

    axis: Axis = field(default_factory=lambda: Axis("sequence"))

    @staticmethod
    def over(axis: Axis, by_heads: bool = False) -> GatheringRows:
        return GatheringRows(axis.index, axis.size, by_heads=by_heads, axis=axis)

    @property
    def order(self) -> list[int]:
        """Which of the chunks, row by row, is at each place of a sequence.

        It has the first chunks of all rows in order, then the second ones in reverse.
        """
        return [*range(0, 2 * self.n, 2), *range(2 * self.n - 1, 0, -2)]

    def gathered(self, k: Tensor, v: Tensor, n_chunks: int) -> Iterator[tuple[Tensor, Tensor]]:
        each = k.shape[1] // n_chunks
        started = []
        for chunk in zip(k.split(each, 1), v.split(each, 1)):
            # Tokens come first, so that what is gathered lies together.
            x = torch.stack([part.permute(2, 0, 1, 3) for part in chunk], 1)
            started.append(autograd.StartedGather(x, self.axis, LABEL, self.order))
        for gather in started:
            keys, values = gather.wait().permute(1, 2, 3, 0, 4).unbind(0)
            yield keys, values

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        x = autograd.alltoall(torch.stack(tensors), self.axis, 2, 3, LABEL)
        chunks = x.chunk(2 * self.n, 3)
        return torch.cat([chunks[i] for i in self.order], 3).unbind(0)

    def to_tokens(self, x: Tensor) -> Tensor:
        chunks, places = x.chunk(2 * self.n, 1), range(2 * self.n)
        of_rows = torch.cat([chunks[i] for i in sorted(places, key=self.order.__getitem__)], 1)
        return autograd.alltoall(of_rows, self.axis, 1, 2, LABEL)


class ChosenTokenOfParts(nn.Module):
    """Selects one token of each sequence where devices have parts of the sequences.

    x [b, s', h] and global positions [b] give [b, h] on every device. Over columns: forward
    all-reduce, backward identity, because all columns compute the same with it. Over rows: forward
    and backward all-reduce, because one row alone has the labels.
    """

    def __init__(self, axes: Axes, tokens: SequenceRows) -> None:
        super().__init__()
        self.axes, self.tokens = axes, tokens

    def forward(self, x_BSH: Tensor, at_B: Tensor) -> Tensor:
        positions = self.tokens.positions(x_BSH.shape[1], at_B.device)
        match_BS = positions == at_B.unsqueeze(1)
        local = match_BS.long().argmax(1)  # 0 if the token is elsewhere
        mine = x_BSH[torch.arange(len(at_B), device=at_B.device), local]
        terms = mine * match_BS.any(1, keepdim=True).to(mine.dtype)
        return _summed(terms, self.axes, self.tokens)


class JoinedSequence(nn.Module):
    """Returns logits [b, s, n] on every device, given each device's [b, s', n]; n is small.

    All-reduces logits that are zero at other devices' tokens, as `ChosenTokenOfParts` does.
    """

    def __init__(self, axes: Axes, tokens: SequenceRows) -> None:
        super().__init__()
        self.axes, self.tokens = axes, tokens

    def forward(self, logits_BSN: Tensor) -> Tensor:
        b, here, n = logits_BSN.shape
        whole = logits_BSN.new_zeros(b, here * self.tokens.part[1] * self.tokens.n, n)
        positions = self.tokens.positions(here, logits_BSN.device)
        return _summed(whole.index_copy(1, positions, logits_BSN), self.axes, self.tokens)


def _summed(terms: Tensor, axes: Axes, tokens: SequenceRows) -> Tensor:
    if tokens.part[1] > 1:
        terms = autograd.allreduce_identity(terms, axes.col)
    return autograd.allreduce_allreduce(terms, axes.sequence)
