"""Samples with labels: a document, a text or a pair of texts, or a question with choices.

A document of a folder of examples consists of parts, whose lengths are in the column `parts`: the
two texts of a pair, of which the second may be empty, or a passage and the continuations to choose
from. An encoder reads [CLS] A [SEP] B [SEP], and a decoder A and B with an end-of-text token each,
behind the begin-of-text token if its tokenizer puts one before a text.
An encoder-decoder pair reads that as its source, and its decoder the same one token later.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gridformer.data.samples.masked import Masking
from gridformer.data.samples.samples import Arrays, first, padded
from gridformer.data.samples.special import SpecialIds
from gridformer.data.tokenfolder import TokenSplit
from gridformer.utils.batch import IGNORE
from gridformer.utils.errors import DataError

PARTS, LABELS, RIGHT, VALUE = "parts", "labels", "right", "value"
_MOST_COMPARED = 10_000  # questions with truncated choices, which takes about three seconds


class Reading:
    """Puts two texts into one sequence of seq_len tokens, the longer text truncated to fit.

    Args:
        seq_len: Tokens of a sequence.
        special: The special ids, with [CLS] for encoders.
        two_stacks: Whether an encoder reads the sequence, and a decoder the same one token later.
    """

    def __init__(self, seq_len: int, special: SpecialIds, two_stacks: bool = False) -> None:
        self.seq_len, self.special, self.two_stacks = seq_len, special, two_stacks
        self.encoder = special.cls is not None
        # transformers takes the last token that is not padding. If texts end with the token that
        # also pads, that is the token before it, so none is put there.
        self.ends = special.eos != special.pad or self.encoder

    def sequence(self, a: NDArray[np.int64], b: NDArray[np.int64]) -> Arrays:
        """Returns tokens, valid and, for encoders, segments [seq_len]; and at [].

        Args:
            a: The tokens of the first text.
            b: Those of the second one; there is none if they are empty.
        """
        ids, n_first = self.joined(a.tolist(), b.tolist())
        tokens = np.array(ids, dtype=np.int64)
        found = {
            **read_by(tokens, self.seq_len, self.special, self.two_stacks),
            "at": np.array(0 if self.encoder else len(ids) - 1, dtype=np.int64),
        }
        if self.encoder:
            of_b = first(len(ids), self.seq_len) & ~first(n_first, self.seq_len)
            found["segments"] = of_b.astype(np.int64)
        return found

    def joined(self, a: Sequence[int], b: Sequence[int] = ()) -> tuple[list[int], int]:
        """Returns the tokens of a sequence, and how many belong to the first text."""
        special = self.special
        before = [*special.begin] if special.cls is None else [special.cls]
        if not self.encoder and list(a[: len(before)]) == before:
            before = []  # the document already begins with it, see `prepare --bos`
        between = special.sep if special.sep is not None and self.encoder else special.eos
        behind = [between] * (self.ends or not len(before) + len(a) + len(b))
        room = self.seq_len - len(before) - len(behind) - bool(b)
        n_a, n_b = truncated(len(a), len(b), room)
        ids = [*before, *a[:n_a], *([between, *b[:n_b]] if b else []), *behind]
        return ids, len(before) + n_a + 1


class TextExamples:
    """A text, or a pair of texts, and its label."""

    def __init__(
        self, split: TokenSplit, seq_len: int, special: SpecialIds, two_stacks: bool = False
    ) -> None:
        self.split, self.reading = split, Reading(seq_len, special, two_stacks)
        self.n_samples = split.n_documents

    def sample(self, number: int, draw: np.random.Generator) -> Arrays:
        """Returns what `Reading.sequence` returns, and labels []."""
        ids = self.split.document(number)[:-1]  # without the end-of-text token
        parts = self.split.columns.get(PARTS)
        n_a = int(parts[number][0]) if parts is not None else len(ids)
        return self.reading.sequence(ids[:n_a], ids[n_a:]) | {LABELS: self.wanted(number)}

    def wanted(self, number: int) -> NDArray[Any]:
        """Returns what the head should predict []."""
        return label_of(self.split, number)


class NumberExamples(TextExamples):
    """A text, or a pair of texts, and a number."""

    def wanted(self, number: int) -> NDArray[Any]:
        """Returns the number that the head should predict []."""
        return np.array(self.split.columns[VALUE][number], dtype=np.float32)


class LabeledForDecoder:
    """The document and its end-of-text token, classified by its last token, which sees all others.

    A document longer than seq_len is truncated.
    """

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


class ChoiceExamples:
    """A passage with n continuations, each a sequence of its own, and which of them is right."""

    def __init__(
        self,
        split: TokenSplit,
        seq_len: int,
        special: SpecialIds,
        n_choices: int,
        two_stacks: bool = False,
    ) -> None:
        self.split, self.n_choices = split, n_choices
        self.reading = Reading(seq_len, special, two_stacks)
        self.n_samples = split.n_documents
        if split.columns[PARTS].shape[1] != 1 + n_choices:
            found = split.columns[PARTS].shape[1] - 1
            raise DataError(
                f"{split.path}: its questions have {found} choices, not data.n_choices="
                f"{n_choices}: use data.n_choices={found}"
            )

    @cached_property
    def n_alike(self) -> int:
        """How many questions, at least, have choices that are equal once they are truncated."""
        parts = np.asarray(self.split.columns[PARTS], dtype=np.int64)
        passages, choices, most = parts[:, :1], parts[:, 1:], self.reading.seq_len - 5
        cut = ((passages + choices > most) & (2 * choices > most)).any(1)
        draw, found = np.random.default_rng(0), 0
        for number in np.flatnonzero(cut)[:_MOST_COMPARED].tolist():
            read = self.sample(number, draw)
            found += len(np.unique(read.get("source", read["tokens"]), axis=0)) < self.n_choices
        return found

    def sample(self, number: int, draw: np.random.Generator) -> Arrays:
        """Returns what `Reading.sequence` returns for each continuation [n, ...], and labels []."""
        ids = self.split.document(number)[:-1]
        ends = np.cumsum(self.split.columns[PARTS][number])
        passage = ids[: ends[0]]
        choices = [ids[begin:end] for begin, end in pairwise(ends)]
        read = [self.reading.sequence(passage, choice) for choice in choices]
        return {key: np.stack([one[key] for one in read]) for key in read[0]} | {
            LABELS: np.array(self.split.columns[RIGHT][number], dtype=np.int64)
        }


def read_by(ids: NDArray[np.int64], seq_len: int, special: SpecialIds, two_stacks: bool) -> Arrays:
    """Returns the keys of a batch that hold a sequence.

    Args:
        ids: Its tokens, at most `seq_len`.
        seq_len: Its length with padding.
        special: The special ids.
        two_stacks: See Reading.
    """
    tokens, valid = padded(ids, seq_len, special.pad), first(len(ids), seq_len)
    if not two_stacks:
        return {"tokens": tokens, "valid": valid}
    later = np.concatenate([[special.start], tokens[:-1]])
    return {"tokens": later, "source": tokens, "source_valid": valid}


def truncated(n_a: int, n_b: int, room: int) -> tuple[int, int]:
    """Returns how many tokens of two texts are kept: the longer one gives up one after the other.

    If both are equally long, the second one does (Devlin et al. 2019's code).

    Args:
        n_a, n_b: The tokens of each text.
        room: The most tokens that both may have together.
    """
    excess = max(0, n_a + n_b - room)
    longer = min(excess, abs(n_a - n_b))
    if n_a > n_b:
        n_a -= longer
    else:
        n_b -= longer
    both = excess - longer
    return n_a - both // 2, n_b - (both - both // 2)


def label_of(split: TokenSplit, number: int) -> NDArray[np.int64]:
    """Returns the label of a document []."""
    return np.array(split.columns[LABELS][number], dtype=np.int64)


def _document(split: TokenSplit, number: int, at_most: int) -> NDArray[np.int64]:
    start = int(split.offsets[number])
    return split.window(start, start + min(at_most, split.document_length(number)))
