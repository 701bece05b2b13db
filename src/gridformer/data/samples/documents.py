"""Samples of running text that know where documents begin, for `data.document_mask`.

Attention stays within a document, so the last token of a document, which would have to predict the
first of the next one, predicts nothing. Where documents begin comes from their offsets.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gridformer.config import DataConfig
from gridformer.data.samples.packing import pack
from gridformer.data.samples.samples import Arrays, Samples, first, more_text, padded
from gridformer.data.samples.windows import WindowSamples
from gridformer.data.tokenfolder import TokenSplit
from gridformer.utils.batch import IGNORE
from gridformer.utils.errors import DataError


class DocumentWindows:
    """Windows of running text, as of `WindowSamples`, and which documents are in them.

    A document that begins before its window has position 0 at the window's first token.

    Args:
        split: The split.
        seq_len: Tokens per sample.
        reset: Whether positions restart in each document.

    Raises:
        DataError: The split is too short for a single sample.
    """

    n_left_out = 0

    def __init__(self, split: TokenSplit, seq_len: int, reset: bool = True) -> None:
        self.split, self.seq_len, self.reset = split, seq_len, reset
        self.n_samples = WindowSamples(split, seq_len).n_samples
        self.starts = np.asarray(split.offsets)  # of documents

    def sample(self, number: int, draw: np.random.Generator) -> Arrays:
        """Returns tokens, targets, documents and positions [seq_len]."""
        start = number * self.seq_len
        ids = self.split.window(start, start + self.seq_len + 1)
        begins = self._begins(start, len(ids))
        return {
            "tokens": ids[:-1],
            "targets": np.where(begins[1:], IGNORE, ids[1:]),
            **places_of(begins[:-1].cumsum(), self.reset),
        }

    def _begins(self, start: int, n: int) -> NDArray[np.bool_]:
        """Returns at which of n tokens from `start` on a document begins, [n]."""
        first_one, after = np.searchsorted(self.starts, [start, start + n])
        found = np.zeros(n, dtype=np.bool_)
        found[self.starts[first_one:after] - start] = True
        return found


class PackedDocuments:
    """Samples of whole documents; a document that is longer than a sample is divided.

    A document of n tokens takes n - 1 places: each token but the last is read, and each but the
    first is predicted once in an epoch. The rest of a sample is padding.

    Attributes:
        split: The split.
        seq_len: Places per sample.
        pad: The id of padding.
        reset: Whether positions restart in each document.
        packed: Which documents are in which sample.

    Raises:
        DataError: No document has two tokens.
    """

    n_left_out = 0

    def __init__(self, split: TokenSplit, seq_len: int, pad: int, reset: bool = True) -> None:
        self.split, self.seq_len, self.pad, self.reset = split, seq_len, pad, reset
        self.packed = pack(np.asarray(split.offsets), seq_len)
        self.n_samples = self.packed.n_samples
        if not self.n_samples:
            raise DataError(
                f"{split.path}: none of its {split.n_documents} documents has two tokens, so "
                f"there is nothing to predict: {more_text(split)}"
            )

    def sample(self, number: int, draw: np.random.Generator) -> Arrays:
        """Returns tokens, targets, valid, documents and positions [seq_len]."""
        begin, end = self.packed.bounds[number : number + 2].tolist()
        starts, places = self.packed.starts[begin:end], self.packed.places[begin:end]
        read = [self.split.window(a, a + n + 1) for a, n in zip(starts.tolist(), places.tolist())]
        documents = np.repeat(np.arange(len(read)), places)
        return {
            "tokens": padded(np.concatenate([ids[:-1] for ids in read]), self.seq_len, self.pad),
            "targets": padded(np.concatenate([ids[1:] for ids in read]), self.seq_len, IGNORE),
            "valid": first(len(documents), self.seq_len),
            # Padding is a document of its own.
            **places_of(padded(documents, self.seq_len, len(read)), self.reset),
        }


def with_documents(data: DataConfig, split: TokenSplit, seq_len: int, pad: int) -> Samples:
    """Returns the samples of a split that `document_mask` and `packing` ask for.

    Args:
        data: The section of the run.
        split: The split.
        seq_len: Tokens per sample.
        pad: The id of padding.

    Raises:
        DataError: The split holds no sample.
    """
    if data.packing == "documents":
        return PackedDocuments(split, seq_len, pad, data.reset_positions)
    return DocumentWindows(split, seq_len, data.reset_positions)


def places_of(documents: NDArray[np.int64], reset: bool) -> Arrays:
    """Returns the numbers of documents [n], counted from 0, and positions if they restart.

    Args:
        documents: A number of the document of each token [n], ascending.
        reset: Whether positions begin anew with each document.
    """
    found: Arrays = {"documents": documents - documents[0]}
    if reset:
        found["positions"] = np.arange(len(documents)) - np.searchsorted(documents, documents)
    return found
