"""Samples of conversations: the model reads all of one and learns to say its answers."""

from __future__ import annotations

import numpy as np

from gridformer.data.samples.samples import Arrays, padded
from gridformer.data.samples.special import SpecialIds
from gridformer.data.tokenfolder import TokenSplit
from gridformer.utils.batch import IGNORE
from gridformer.utils.errors import DataError


class ChatSamples:
    """One sample per conversation, padded at its end.

    A conversation longer than seq_len + 1 tokens is truncated; `n_truncated` counts these. If
    nothing of an answer would be left, it is left out; `n_left_out` counts those.

    Attributes:
        n_held: The tokens that all samples read; what else they have is padding.
        n_positions: The positions of a sample.

    Raises:
        DataError: No conversation fits.
    """

    def __init__(self, split: TokenSplit, seq_len: int, special: SpecialIds) -> None:
        self.split, self.seq_len, self.special = split, seq_len, special
        first = split.columns["first_answer"]
        self.numbers = np.flatnonzero(first <= seq_len)  # 8 bytes per document, as an offset
        self.n_samples = len(self.numbers)
        self.n_left_out = split.n_documents - self.n_samples
        # The folder's end-of-text token is not a part of the conversation.
        lengths = np.diff(split.offsets)[self.numbers] - 1
        self.n_truncated = int((lengths > seq_len + 1).sum())
        self.n_held = int(np.minimum(lengths - 1, seq_len).sum())
        self.n_positions = seq_len
        if not self.n_samples:
            raise DataError(
                f"{split.path}: no answer of its {split.n_documents} conversations begins within "
                f"data.seq_len={seq_len} tokens: use data.seq_len={int(first.min())} or more"
            )

    def sample(self, number: int, draw: np.random.Generator) -> Arrays:
        """Returns tokens and targets [seq_len]; targets outside answers are IGNORE."""
        document = int(self.numbers[number])
        start = int(self.split.offsets[document])
        length = min(self.split.document_length(document) - 1, self.seq_len + 1)
        ids = self.split.window(start, start + length)
        said = self.split.columns["answer"][start + 1 : start + length] != 0
        return {
            "tokens": padded(ids[:-1], self.seq_len, self.special.pad),
            "targets": padded(np.where(said, ids[1:], IGNORE), self.seq_len, IGNORE),
        }
