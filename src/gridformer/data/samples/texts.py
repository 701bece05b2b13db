"""Samples of texts: running text, whole documents, conversations, and pairs for translation.

The next tokens are the targets. With `data.document_mask` attention stays within a document, so the
last token of a document, which would have to predict the first of the next one, predicts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gridformer.data.samples.packing import pack, pack_pairs
from gridformer.data.samples.sample import (
    Arrays,
    Samples,
    SpecialIds,
    first,
    more_text,
    padded,
    stacked,
)
from gridformer.data.tokenfolder import TokenSplit
from gridformer.utils.batch import IGNORE
from gridformer.utils.errors import DataError


@dataclass(eq=False)
class WindowSamples(Samples):
    """Divides a split into windows of seq_len tokens. They have no random choices.

    Sample i is tokens [i*seq_len, (i+1)*seq_len], one more than seq_len, so that inputs and targets
    are the same window shifted by one; neighboring samples share that one token. `n_samples` counts
    the windows whose last target exists. A document that begins before its window has position 0
    at the window's first token.
    """

    split: TokenSplit
    seq_len: int
    documents: bool = False  # whether samples say which documents are in them
    reset: bool = True  # whether positions restart in each document

    def __post_init__(self) -> None:
        seq_len, n_tokens = self.seq_len, self.split.n_tokens
        if seq_len < 1:
            raise ValueError(f"{seq_len=} must be at least 1")
        self.n_samples = max(0, n_tokens - 1) // seq_len
        if self.n_samples == 0:
            shorter = f"use data.seq_len of at most {n_tokens - 1}, or " if n_tokens > 1 else ""
            raise DataError(
                f"{self.split.path}: {n_tokens} tokens hold no sample of data.seq_len={seq_len}, "
                f"which takes {seq_len + 1}: {shorter}{more_text(self.split)}"
            )

    def read(
        self, numbers: NDArray[np.int64], draw: Callable[[int], np.random.Generator]
    ) -> Arrays:
        """Returns tokens and targets [b, seq_len], and with documents also these and positions.

        It reads only these tokens from the disk.
        """
        ids = self.split.windows(numbers * self.seq_len, self.seq_len + 1)
        tokens, targets = np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])
        if not self.documents:
            return {"tokens": tokens, "targets": targets}
        begins = np.stack([self._begins(number * self.seq_len) for number in numbers.tolist()])
        owners = [places_of(row[:-1].cumsum(), self.reset) for row in begins]
        targets = np.where(begins[:, 1:], IGNORE, targets)
        return {"tokens": tokens, "targets": targets, **stacked(owners)}

    def _begins(self, start: int) -> NDArray[np.bool_]:
        """Returns at which tokens of a window a document begins [seq_len + 1]."""
        starts, n = self.split.offsets, self.seq_len + 1
        first_one, after = np.searchsorted(starts, [start, start + n])
        begins = np.zeros(n, dtype=np.bool_)
        begins[starts[first_one:after] - start] = True
        return begins

    def sample(self, number: int, draw: np.random.Generator) -> Arrays:
        """Returns what `read` does, of one sample."""
        return {key: rows[0] for key, rows in self.read(np.array([number]), lambda _: draw).items()}


@dataclass(eq=False)
class PackedDocuments(Samples):
    """Samples of whole documents and padding; one that is longer than a sample is divided.

    Each token of a document but the last is read, and each but the first is predicted.
    """

    split: TokenSplit
    seq_len: int
    pad: int
    reset: bool = True  # whether positions restart in each document

    def __post_init__(self) -> None:
        self.starts, self.places, self.bounds = pack(np.asarray(self.split.offsets), self.seq_len)
        self.n_samples = len(self.bounds) - 1
        if not self.n_samples:
            raise DataError(
                f"{self.split.path}: none of its {self.split.n_documents} documents has two "
                f"tokens, so there is nothing to predict: {more_text(self.split)}"
            )

    def sample(self, number: int, draw: np.random.Generator) -> Arrays:
        """Returns tokens, targets, valid, documents and positions [seq_len]."""
        some = slice(*self.bounds[number : number + 2].tolist())
        pieces = zip(self.starts[some].tolist(), self.places[some].tolist())
        read = [self.split.window(start, start + n + 1) for start, n in pieces]
        each = [(ids[:-1], ids[1:]) for ids in read]
        return _side_by_side(each, self.seq_len, self.pad, self.reset)


@dataclass(eq=False)
class ChatSamples(Samples):
    """One or several conversations per sample; the model reads all and learns to say the answers.

    A conversation longer than seq_len + 1 tokens is truncated. If nothing of an answer would be
    left, it is left out.
    """

    split: TokenSplit
    seq_len: int
    special: SpecialIds
    packed: bool = False  # whether a sample holds several, which do not see one another
    reset: bool = True  # whether positions of packed samples restart in each conversation

    def __post_init__(self) -> None:
        split, seq_len = self.split, self.seq_len
        begins = split.columns["first_answer"]
        self.numbers = np.flatnonzero(begins <= seq_len)  # 8 bytes per document, as an offset
        if not len(self.numbers):
            raise DataError(
                f"{split.path}: no answer of its {split.n_documents} conversations begins within "
                f"data.seq_len={seq_len} tokens: use data.seq_len={int(begins.min())} or more"
            )
        self.n_left_out = split.n_documents - len(self.numbers)
        # The folder's end-of-text token is not a part of the conversation.
        lengths = np.diff(split.offsets)[self.numbers] - 1
        places = np.minimum(lengths - 1, seq_len)
        self.n_truncated = int((lengths > seq_len + 1).sum())
        self.n_held, self.n_positions = int(places.sum()), seq_len
        self.bounds = np.arange(len(self.numbers) + 1)
        if self.packed:
            # As if the conversations of these lengths followed one another.
            starts = np.concatenate([[0], (places + 1).cumsum()])
            placed, _, self.bounds = pack(starts, seq_len)
            self.numbers = self.numbers[np.searchsorted(starts, placed)]
        self.n_samples = len(self.bounds) - 1

    def sample(self, number: int, draw: np.random.Generator) -> Arrays:
        """Returns tokens and targets [seq_len]; targets outside answers are IGNORE.

        Packed samples also have valid, documents and positions [seq_len].
        """
        begin, end = self.bounds[number : number + 2].tolist()
        each = [self._conversation(document) for document in self.numbers[begin:end].tolist()]
        sample = _side_by_side(each, self.seq_len, self.special.pad, self.reset)
        return sample if self.packed else {key: sample[key] for key in ("tokens", "targets")}

    def _conversation(self, document: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the tokens and targets of one conversation, both of the same length."""
        start = int(self.split.offsets[document])
        length = min(self.split.document_length(document) - 1, self.seq_len + 1)
        ids = self.split.window(start, start + length)
        said = self.split.columns["answer"][start + 1 : start + length] != 0
        return ids[:-1], np.where(said, ids[1:], IGNORE)


@dataclass(eq=False)
class PairSamples(Samples):
    """One or several pairs per sample: the model reads the first text and generates the second.

    The documents of a folder alternate between source and target. Pairs are left out if the source
    is longer than source_len, or the target longer than seq_len, end-of-text tokens included. Of
    packed pairs sources are side by side in the row of the encoder, and targets, in the same order,
    in that of the decoder.
    """

    split: TokenSplit
    source_len: int
    seq_len: int
    special: SpecialIds
    packed: bool = False

    def __post_init__(self) -> None:
        split, source_len, seq_len = self.split, self.source_len, self.seq_len
        lengths = np.diff(split.offsets).reshape(-1, 2)
        fits = (lengths[:, 0] <= source_len) & (lengths[:, 1] <= seq_len)
        self.pairs = np.flatnonzero(fits)  # 8 bytes per pair, as much as an offset
        if not len(self.pairs):
            shortest = lengths[lengths.sum(axis=1).argmin()]
            raise DataError(
                f"{split.path}: none of its {len(lengths)} pairs fits data.source_len={source_len} "
                f"and data.seq_len={seq_len}: the shortest takes data.source_len={shortest[0]} and "
                f"data.seq_len={shortest[1]}"
            )
        self.n_left_out = len(lengths) - len(self.pairs)
        self.n_held, self.n_positions = int(lengths[self.pairs].sum()), source_len + seq_len
        self.bounds = np.arange(len(self.pairs) + 1)
        if self.packed:
            order, self.bounds = pack_pairs(lengths[self.pairs], (source_len, seq_len))
            self.pairs = self.pairs[order]
        self.n_samples = len(self.bounds) - 1

    def sample(self, number: int, draw: np.random.Generator) -> Arrays:
        """Returns source and source_valid [source_len]; tokens and targets [seq_len].

        Packed samples also have the documents and positions of source and tokens.
        """
        begin, end = self.bounds[number : number + 2].tolist()
        sources, targets = (
            [self.split.document(2 * pair + side) for pair in self.pairs[begin:end].tolist()]
            for side in (0, 1)
        )
        source = np.concatenate(sources)
        start = [self.special.start]
        tokens = np.concatenate([part for ids in targets for part in (start, ids[:-1])])
        sample = {
            "source": padded(source, self.source_len, self.special.pad),
            "source_valid": first(len(source), self.source_len),
            "tokens": padded(tokens, self.seq_len, self.special.pad),
            "targets": padded(np.concatenate(targets), self.seq_len, IGNORE),
        }
        if not self.packed:
            return sample
        # No token of a pair may see the padding behind sources, so it has a number of its own. The
        # padding behind targets continues the last pair, so that it has a source to see. Nothing
        # before it sees it, because the decoder is causal.
        n = end - begin
        for_encoder = places_of(padded(_owners(sources), self.source_len, n), True)
        for_decoder = places_of(padded(_owners(targets), self.seq_len, n - 1), True)
        return sample | {f"source_{key}": value for key, value in for_encoder.items()} | for_decoder


def places_of(documents: NDArray[np.int64], reset: bool) -> Arrays:
    """Returns the numbers of documents [n], counted from 0, and positions if they restart.

    Args:
        documents: A number of the document of each token [n], ascending.
    """
    places: Arrays = {"documents": documents - documents[0]}
    if reset:
        places["positions"] = np.arange(len(documents)) - np.searchsorted(documents, documents)
    return places


def _owners(texts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Returns the number of the text that each token is of, for texts side by side."""
    return np.repeat(np.arange(len(texts)), [len(ids) for ids in texts])


def _side_by_side(
    each: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]], seq_len: int, pad: int, reset: bool
) -> Arrays:
    """Returns a sample of texts, each given as its tokens and targets."""
    tokens, targets = (np.concatenate(parts) for parts in zip(*each))
    owners = _owners([ids for ids, _ in each])
    return {
        "tokens": padded(tokens, seq_len, pad),
        "targets": padded(targets, seq_len, IGNORE),
        "valid": first(len(tokens), seq_len),
        # Padding is a document of its own.
        **places_of(padded(owners, seq_len, len(each)), reset),
    }
