"""Which tokens of every sequence a device has where rows of a grid divide the sequence among them.

Everything but attention is local in tokens. Attention gathers keys and values over rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from gridformer.models.blocks.scores import DocumentBounds, ScoreBias, document_bounds

Made = TypeVar("Made")
# What is added to the scores of the queries of a device: of each of its segments if it has two.
SegmentBias = ScoreBias | None | tuple[ScoreBias | None, ...]
Attend = Callable[[Tensor, Tensor, Tensor, bool, ScoreBias | None, int], Tensor]


@dataclass(frozen=True)
class SequenceRows:
    """The tokens of every sequence that this device has, for sequences of any length.

    A sequence has 2 n chunks of equal length. Row i of n has the chunks i and 2 n - 1 - i, so that
    causal attention is the same work on all rows. Where columns divide the tokens of a row, a
    device has one contiguous part of them.

    Attributes:
        index: i, the index of this device's row.
        n: The number of rows; 1 if each device has whole sequences.
        part: The index of this device's part of the row's tokens, and the number of parts.
        by_heads: Whether each row attends for whole sequences with some of the heads, instead of
            gathering the keys and values of all of them.
    """

    index: int = 0
    n: int = 1
    part: tuple[int, int] = (0, 1)
    by_heads: bool = False

    def segments(self, s: int) -> tuple[slice, ...]:
        """Returns where the tokens of the row lie in a sequence of s, in their order."""
        if self.n == 1:
            return (slice(0, s),)
        size = s // (2 * self.n)
        chunks = self.index, 2 * self.n - 1 - self.index
        return tuple(slice(chunk * size, (chunk + 1) * size) for chunk in chunks)

    def of_row(self, x: Tensor) -> Tensor:
        """Returns what the row has of x [.., s]."""
        if self.n == 1:
            return x
        return torch.cat([x[..., segment] for segment in self.segments(x.shape[-1])], -1)

    def runs(self, here: int) -> tuple[int, int, int]:
        """Returns the position of the first of the device's tokens, and where they skip some.

        Args:
            here: How many tokens of each sequence the device has.

        Returns:
            (first, split, skipped): token i is at position first + i, from token `split` on at
            first + i + skipped. `split` may be less than 0 or more than `here`.
        """
        number, parts = self.part
        if self.n == 1:
            return number * here, here, 0
        size, before = here * parts // 2, number * here
        first, skipped = self.index * size + before, 2 * (self.n - 1 - self.index) * size
        return first, size - before, skipped

    def positions(self, here: int, device: torch.device) -> Tensor:
        """Returns the positions of the device's tokens, int64 [here]; for `here` see `runs`."""
        first, split, skipped = self.runs(here)
        place = torch.arange(here, device=device)
        return place + first + (place >= split) * skipped

    def each_segment(self, s: int, make: Callable[[slice], Made]) -> Made | tuple[Made, ...]:
        """Makes something for each segment of queries in sequences of s tokens.

        It is a tuple, unless each device attends for whole sequences.
        """
        if self.by_heads:
            return make(slice(0, s))
        made = tuple(make(queries) for queries in self.segments(s))
        return made if self.n > 1 else made[0]

    def document_bounds(self, documents_BT: Tensor, queries: slice, keys: int) -> DocumentBounds:
        """Returns the bounds of a segment's queries, and of the first `keys` keys that they see."""
        if self.n == 1:
            return document_bounds(documents_BT)
        return document_bounds(documents_BT[:, queries], documents_BT[:, :keys])

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
        """Attends from the tokens of this row to those of all rows; returns [b, s / n, heads * d].

        Rows that divide sequences send keys and values (gridformer.parallel.tensor.sequence).

        Args:
            attend: Computes [b, s', heads * d] from queries, keys, values, `causal`, a mask and the
                position of the first query.
            whole: Whether all heads must be computed together.
        """
        assert self.n == 1
        assert not isinstance(masks, tuple)
        return attend(q_BNSD, k_BMTD, v_BMTD, causal, masks, 0)
