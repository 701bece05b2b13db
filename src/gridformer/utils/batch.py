"""What samples are made of: the keys of a batch, shared by data, models and training.

key            shape, type     meaning
tokens         [b, s] int64    what the model (or its decoder) reads
targets        [b, s] int64    what it should say at each place; IGNORE does not count
valid          [b, s] bool     bert, gpt2: which tokens are real; left out where all are
segments       [b, s] int64    bert: 0 for sentence A, 1 for sentence B
pair           [b] int64       bert: 1 if B follows A in the text, 0 if it was drawn elsewhere
source         [b, S] int64    t5, transformer: what the encoder reads
source_valid   [b, S] bool     t5, transformer: which of them are real; left out where all are
at             [b] int64       the token whose vector goes to the classification branch
labels         [b] int64       what that branch should say
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

IGNORE = -100  # a target that does not count in the loss

Batch = dict[str, "Tensor"]


@dataclass(frozen=True)
class MicroBatch:
    """rows: of the step's global batch; batch: what these rows hold, on the model's device."""

    rows: slice
    batch: Batch


def next_words(windows: Tensor) -> Batch:
    """Windows [b, s+1] of text as a batch: at each place the next token is wanted."""
    return {"tokens": windows[:, :-1], "targets": windows[:, 1:]}
