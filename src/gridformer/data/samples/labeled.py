"""Labeled documents: one a sample, cut to the length of the run, with its label."""

from __future__ import annotations

import numpy as np

from gridformer.data.samples.masked import Masking
from gridformer.data.samples.samples import Arrays, first, padded
from gridformer.data.samples.special import SpecialIds
from gridformer.data.tokenfolder import TokenSplit
from gridformer.utils.batch import IGNORE


class LabeledForDecoder:
    """The document and its end; the last real token, which has seen all others, is classified."""

    n_left_out = 0

    def __init__(self, split: TokenSplit, seq_len: int, special: SpecialIds) -> None:
        self.split, self.seq_len, self.special = split, seq_len, special
        self.n_samples = split.n_documents

    def sample(self, number: int, draw: np.random.Generator) -> Arrays:
        """tokens, targets (next words), valid [seq_len]; at, labels []."""
        ids = _document(self.split, number, self.seq_len + 1)
        tokens, targets = ids[: self.seq_len], ids[1:]
        return {
            "tokens": padded(tokens, self.seq_len, self.special.pad),
            "targets": padded(targets, self.seq_len, IGNORE),
            "valid": first(len(tokens), self.seq_len),
            "at": np.array(len(tokens) - 1, dtype=np.int64),
            "labels": _label(self.split, number),
        }


class LabeledForEncoder:
    """[CLS] document [SEP] with masked words; the [CLS] is classified."""

    n_left_out = 0

    def __init__(self, split: TokenSplit, seq_len: int, special: SpecialIds) -> None:
        self.split, self.seq_len, self.special = split, seq_len, special
        self.masking = Masking(special)
        self.n_samples = split.n_documents

    def sample(self, number: int, draw: np.random.Generator) -> Arrays:
        """tokens, targets (masked words), valid, segments (all 0) [seq_len]; at, labels []."""
        cls, sep = self.special.cls, self.special.sep
        n_text = min(self.split.document_length(number) - 1, self.seq_len - 2)  # without its end
        read, said = self.masking.hide(_document(self.split, number, n_text), draw)
        tokens = np.concatenate([[cls], read, [sep]]).astype(np.int64)
        targets = np.concatenate([[IGNORE], said, [IGNORE]])
        return {
            "tokens": padded(tokens, self.seq_len, self.special.pad),
            "targets": padded(targets, self.seq_len, IGNORE),
            "valid": first(len(tokens), self.seq_len),
            "segments": np.zeros(self.seq_len, dtype=np.int64),
            "at": np.array(0, dtype=np.int64),
            "labels": _label(self.split, number),
        }


def _document(split: TokenSplit, number: int, at_most: int) -> np.ndarray:
    start = int(split.offsets[number])
    return split.window(start, start + min(at_most, split.document_length(number)))


def _label(split: TokenSplit, number: int) -> np.ndarray:
    assert split.labels is not None
    return np.array(split.labels[number], dtype=np.int64)
