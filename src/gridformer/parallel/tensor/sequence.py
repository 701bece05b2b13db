"""Sequences that are divided over devices: rows of a grid, columns, or both.

Rows (`layout.rows_over: sequence`) have two chunks of every sequence each
(gridformer.models.blocks.sequence), and columns contiguous parts of these tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gridformer.comm import autograd
from gridformer.mesh import Axes, Axis
from gridformer.models import blocks
from gridformer.models.blocks import SequenceRows
from gridformer.models.blocks.scores import ScoreBias, ScoreParts, SharedBias
from gridformer.models.blocks.sequence import Attend, SegmentBias

LABEL = "attention"
MOST_CHUNKS = 4  # of heads of keys and values, which travel while attention to others is computed


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

    def attend(
        self,
        attend: Attend,
        q_BNSD: Tensor,
        k_BMTD: Tensor,
        v_BMTD: Tensor,
        causal: bool,
        masks: SegmentBias,
        whole: bool = False,
    ) -> Tensor:
        qkv = q_BNSD, k_BMTD, v_BMTD
        if self.by_heads:
            assert not isinstance(masks, tuple)
            together = q_BNSD.shape == k_BMTD.shape
            q, k, v = (
                self._to_heads(*qkv)
                if together
                else (
                    *self._to_heads(q_BNSD),
                    *self._to_heads(k_BMTD, v_BMTD),
                )
            )
            return self._to_tokens(attend(q, k, v, causal, masks, 0))
        # Each of the row's two segments of queries attends to the keys up to its own end if causal.
        segments = self.segments(q_BNSD.shape[2] * self.n)
        each = masks if isinstance(masks, tuple) else (masks,) * len(segments)
        heads = k_BMTD.shape[1]
        whole = whole or any(map(_by_head, each))
        n_chunks = 1 if whole else next(n for n in range(MOST_CHUNKS, 0, -1) if heads % n == 0)
        started = []
        for chunk in zip(k_BMTD.chunk(n_chunks, 1), v_BMTD.chunk(n_chunks, 1)):
            # Tokens come first, so that what is gathered lies together.
            x = torch.stack([part.permute(2, 0, 1, 3) for part in chunk], 1)
            started.append(autograd.StartedGather(x, self.axis, LABEL, self.order))
        results = []
        for q, gather in zip(q_BNSD.chunk(n_chunks, 1), started):
            k, v = gather.wait().permute(1, 2, 3, 0, 4).unbind(0)
            parts = []
            for q_part, queries, mask in zip(q.chunk(len(segments), 2), segments, each):
                end = queries.stop if causal else k.shape[2]
                some = q_part, k[:, :, :end], v[:, :, :end]
                parts.append(attend(*some, causal, mask, queries.start))
            results.append(torch.cat(parts, 1))
        return results[0] if n_chunks == 1 else torch.cat(results, -1)

    def _to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Turns all heads of the row's tokens into some heads of all tokens [b, n / rows, s, d].

        The tensors have the same shape and travel together.
        """
        x = autograd.alltoall(torch.stack(tensors), self.axis, 2, 3, LABEL)
        chunks = x.chunk(2 * self.n, 3)
        return torch.cat([chunks[i] for i in self.order], 3).unbind(0)

    def _to_tokens(self, x: Tensor) -> Tensor:
        """Turns results [b, s, n d / rows] into those of all heads for the row's tokens."""
        chunks, places = x.chunk(2 * self.n, 1), range(2 * self.n)
        of_rows = torch.cat([chunks[i] for i in sorted(places, key=self.order.__getitem__)], 1)
        return autograd.alltoall(of_rows, self.axis, 1, 2, LABEL)


def _by_head(mask: ScoreBias | None) -> bool:
    """Whether what is added to scores differs between heads, and so is not divided."""
    if isinstance(mask, Tensor):
        return mask.shape[1] > 1
    return isinstance(mask, SharedBias) or (isinstance(mask, ScoreParts) and mask.bias is not None)


def token_roles(
    axes: Axes, tokens: SequenceRows, block: int, pooled_block: int
) -> dict[str, Callable[[Any], nn.Module | None]]:
    """Returns what schemes make of modules that must know which tokens and columns they have.

    Args:
        tokens: The tokens between sections.
        block: The index of the device's block of h there.
        pooled_block: That of its block of a pooler's columns.
    """

    def dropout(plain: blocks.Dropout) -> None:
        plain.sequence, plain.block = tokens, block

    def pooled_dropout(plain: blocks.PooledDropout) -> None:
        plain.block = pooled_block

    roles: dict[str, Callable[[Any], nn.Module | None]]
    roles = {"dropout": dropout, "pooled_dropout": pooled_dropout}
    if tokens != SequenceRows():  # devices have parts of the sequences
        roles["chosen_token"] = lambda plain: ChosenTokenOfParts(axes, tokens)
        roles["whole_sequence"] = lambda plain: JoinedSequence(axes, tokens)
    return roles


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
