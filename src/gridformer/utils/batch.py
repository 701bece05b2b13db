"""The keys of a batch, which data, models and training share.

key            shape, type     meaning
tokens         [b, s] int64    what the model (or its decoder) reads
targets        [b, s] int64    the token to predict at each position; IGNORE does not count
valid          [b, s] bool     bert, gpt2: False for padding; absent without padding
segments       [b, s] int64    bert: 0 for sentence A, 1 for sentence B
documents      [b, s] int64    the number of each position's document, ascending in a row; attention
                               stays within it; absent if attention crosses documents. Padding has
                               a number of its own. t5, transformer: the number of its pair, where
                               padding belongs to the last one, because it must see some source
positions      [b, s] int64    each position's number in its document; absent if it is that in the
                               row
pair           [b] int64       bert: 1 if B follows A in the text, 0 if B is from elsewhere
source         [b, S] int64    t5, transformer: what the encoder reads
source_valid   [b, S] bool     t5, transformer: False for padding; absent without padding
source_documents, source_positions
               [b, S] int64    t5, transformer: as documents and positions, for the source; padding
                               has a number of its own. Every number in documents is one here, too
at             [b] int64       the position whose vector the classification head reads
labels         [b] int64       the label that this head should predict; [b] float32 with
                               data.task=regression, the number that it should predict, where NaN
                               does not count
answer         [b, 2] int64    the first and the last token of the answer; both 0 for none
context        [b, s] int64    answers, in evaluations only: 2 where an answer may begin or end, 1
                               where it may only end, otherwise 0

With data.task=choice a sample is n sequences, and `labels` tells which one is right: tokens, valid,
segments, source and source_valid are [b, n, s] and `at` is [b, n]. Micro-batches have them as b n
sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

IGNORE = -100  # a target that the loss ignores

Batch = dict[str, "Tensor"]


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of the global batch of a step."""

    rows: slice
    batch: Batch  # their data, on the device of the model


def counts(wanted: Tensor) -> Tensor:
    """Returns where targets count: labels and tokens that are not IGNORE, numbers but not NaN."""
    return ~wanted.isnan() if wanted.is_floating_point() else wanted != IGNORE


def next_words(windows: Tensor) -> Batch:
    """Turns windows of text, int64 [b, s+1], into a batch whose targets are the next tokens."""
    return {"tokens": windows[:, :-1], "targets": windows[:, 1:]}
