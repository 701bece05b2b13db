"""Labeled documents: one per sample, truncated to the length of the run, with its label."""

from __future__ import annotations

import numpy as np

from gridformer.data.samples.examples import label_of
from gridformer.data.samples.masked import Masking
from gridformer.data.samples.samples import Arrays, first, padded
from gridformer.data.samples.special import SpecialIds
from gridformer.data.tokenfolder import TokenSplit
from gridformer.utils.batch import IGNORE


class LabeledForDecoder:
    """The document and its end-of-text token, classified by its last token, which sees all others.

    A document longer than seq_len is truncated.
    """

    n_left_out = 0

    def __init__(self, split: TokenSplit, seq_len: int, special: SpecialIds) -> None:
        self.split, self.seq_len, self.special = split, seq_len, special
        self.n_samples = split.n_documents

    def sample(self, number: int, draw: np.random.Generator) -> Arrays:
        """Returns tokens, targets (the next tokens) and valid [seq_len]; at and labels []."""
        ids = _document(self.split, number, self.seq_len + 1)
        tokens, targets = ids[: self.seq_len], ids[1:]
        return {
            "tokens": padded(tokens, self.seq_len, self.special.pad),
            "targets": padded(targets, self.seq_len, IGNORE),
            "valid": first(len(tokens), self.seq_len),
            "at": np.array(len(tokens) - 1, dtype=np.int64),
            "labels": label_of(self.split, number),
        }


class LabeledForEncoder:
    """[CLS] document [SEP] with masked words, classified by its [CLS]."""

    n_left_out = 0

    def __init__(self, split: TokenSplit, seq_len: int, special: SpecialIds) -> None:
        self.split, self.seq_len, self.special = split, seq_len, special
        self.masking = Masking(special)
        self.n_samples = split.n_documents

    def sample(self, number: int, draw: np.random.Generator) -> Arrays:
        """Returns tokens, masked words as targets, valid, segments [seq_len]; at and labels []."""
        cls, sep = self.special.cls, self.special.sep
        # The document without its end-of-text token.
        n_text = min(self.split.document_length(number) - 1, self.seq_len - 2)
        read, said = self.masking.hide(_document(self.split, number, n_text), draw)
        tokens = np.concatenate([[cls], read, [sep]]).astype(np.int64)
        targets = np.concatenate([[IGNORE], said, [IGNORE]])
        return {
            "tokens": padded(tokens, self.seq_len, self.special.pad),
            "targets": padded(targets, self.seq_len, IGNORE),
            "valid": first(len(tokens), self.seq_len),
            "segments": np.zeros(self.seq_len, dtype=np.int64),
            "at": np.array(0, dtype=np.int64),
            "labels": label_of(self.split, number),
        }


def _document(split: TokenSplit, number: int, at_most: int) -> np.ndarray:
    start = int(split.offsets[number])
    return split.window(start, start + min(at_most, split.document_length(number)))
