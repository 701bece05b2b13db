"""Samples of running text, whose next tokens are the targets.

With `data.document_mask` attention stays within a document, so the last token of a document, which
would have to predict the first of the next one, predicts nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gridformer.data.samples.packing import pack
from gridformer.data.samples.samples import Arrays, first, more_text, padded
from gridformer.data.tokenfolder import TokenSplit
from gridformer.utils.batch import IGNORE
from gridformer.utils.errors import DataError


class WindowSamples:
    """Divides a split into windows of seq_len tokens. They have no random choices.

    Sample i is tokens [i*seq_len, (i+1)*seq_len], one more than seq_len, so that inputs and targets
    are the same window shifted by one; neighboring samples share that one token. `n_samples` counts
    the windows whose last target exists.

    Args:
        split: The split.
        seq_len: Tokens per sample.

    Raises:
        DataError: The split is too short for a single sample.
        ValueError: `seq_len` is less than 1.
    """

    def __init__(self, split: TokenSplit, seq_len: int) -> None:
        if seq_len < 1:
            raise ValueError(f"{seq_len=} must be at least 1")
        self.split, self.seq_len = split, seq_len
        self.n_samples = max(0, split.n_tokens - 1) // seq_len
        if self.n_samples == 0:
            raise DataError(_too_short(split, seq_len))

    def sample(self, number: int, draw: np.random.Generator) -> Arrays:
        """Returns tokens and targets [seq_len]."""
        return {key: value[0] for key, value in self.together(np.array([number])).items()}

    def together(self, numbers: NDArray[np.int64]) -> Arrays:
        """Returns tokens and targets [len(numbers), seq_len] of several samples.

        It reads only these from the disk.

        Raises:
            DataError: An id is outside the vocabulary, which happens only in a damaged file.
        """
        ids = self.split.windows(numbers * self.seq_len, self.seq_len + 1)
        tokens, targets = ids[:, :-1], ids[:, 1:]
        return {"tokens": np.ascontiguousarray(tokens), "targets": np.ascontiguousarray(targets)}


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


def _too_short(split: TokenSplit, seq_len: int) -> str:
    shorter = f"use data.seq_len of at most {split.n_tokens - 1}, or " if split.n_tokens > 1 else ""
    return (
        f"{split.path}: {split.n_tokens} tokens hold no sample of data.seq_len={seq_len}, which "
        f"takes {seq_len + 1}: {shorter}{more_text(split)}"
    )
