"""Samples of conversations: the model reads all of one and learns to say its answers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gridformer.data.samples.documents import places_of
from gridformer.data.samples.packing import pack
from gridformer.data.samples.samples import Arrays, first, padded
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
        begins = split.columns["first_answer"]
        self.numbers = np.flatnonzero(begins <= seq_len)  # 8 bytes per document, as an offset
        self.n_samples = len(self.numbers)
        self.n_left_out = split.n_documents - self.n_samples
        # The folder's end-of-text token is not a part of the conversation.
        lengths = np.diff(split.offsets)[self.numbers] - 1
        self.places = np.minimum(lengths - 1, seq_len)  # that a conversation takes
        self.n_truncated = int((lengths > seq_len + 1).sum())
        self.n_held = int(self.places.sum())
        self.n_positions = seq_len
        if not self.n_samples:
            raise DataError(
                f"{split.path}: no answer of its {split.n_documents} conversations begins within "
                f"data.seq_len={seq_len} tokens: use data.seq_len={int(begins.min())} or more"
            )

    def sample(self, number: int, draw: np.random.Generator) -> Arrays:
        """Returns tokens and targets [seq_len]; targets outside answers are IGNORE."""
        tokens, targets = self._read(int(self.numbers[number]))
        return {
            "tokens": padded(tokens, self.seq_len, self.special.pad),
            "targets": padded(targets, self.seq_len, IGNORE),
        }

    def _read(self, document: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the tokens and targets of one conversation, both of the same length."""
        start = int(self.split.offsets[document])
        length = min(self.split.document_length(document) - 1, self.seq_len + 1)
        ids = self.split.window(start, start + length)
        said = self.split.columns["answer"][start + 1 : start + length] != 0
        return ids[:-1], np.where(said, ids[1:], IGNORE)


class PackedChats(ChatSamples):
    """Samples of several conversations each, which do not see one another (`data.document_mask`).

    Every conversation is in one sample, truncated or left out as in ChatSamples.

    Args:
        split, seq_len, special: See ChatSamples.
        reset: Whether positions restart in each conversation.
    """

    def __init__(
        self, split: TokenSplit, seq_len: int, special: SpecialIds, reset: bool = True
    ) -> None:
        super().__init__(split, seq_len, special)
        self.reset = reset
        # As if the conversations of these lengths followed one another.
        starts = np.concatenate([[0], (self.places + 1).cumsum()])
        packed = pack(starts, seq_len)
        self.order = self.numbers[np.searchsorted(starts, packed.starts)]
        self.bounds, self.n_samples = packed.bounds, packed.n_samples

    def sample(self, number: int, draw: np.random.Generator) -> Arrays:
        """Returns tokens, targets, valid, documents and positions [seq_len]."""
        begin, end = self.bounds[number : number + 2].tolist()
        read = [self._read(document) for document in self.order[begin:end].tolist()]
        tokens, targets = (np.concatenate(parts) for parts in zip(*read))
        owners = np.repeat(np.arange(len(read)), [len(ids) for ids, _ in read])
        return {
            "tokens": padded(tokens, self.seq_len, self.special.pad),
            "targets": padded(targets, self.seq_len, IGNORE),
            "valid": first(len(tokens), self.seq_len),
            # Padding is a document of its own.
            **places_of(padded(owners, self.seq_len, len(read)), self.reset),
        }
