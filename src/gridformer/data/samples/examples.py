"""Samples of fine-tuning: labels of texts, choices between texts, and answers within contexts.

A document of a folder of examples consists of parts, whose lengths are in the column `parts`: the
two texts of a pair, of which the second may be empty, or a passage and the continuations to choose
from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gridformer.data.samples.masked import Masking
from gridformer.data.samples.sample import (
    Arrays,
    Samples,
    SpecialIds,
    first,
    padded,
    stacked,
)
from gridformer.data.tokenfolder import TokenSplit
from gridformer.data.tokensplit import LABELS
from gridformer.utils.batch import IGNORE
from gridformer.utils.errors import DataError

PARTS, RIGHT, VALUE = "parts", "right", "value"
ANSWER = "answer"  # the column of the first and last token of the answer in the context; -1 if none
MOST_QUESTION = 64  # tokens of a question that are read, as in the original code
_MOST_COMPARED = 10_000  # questions with truncated choices, which takes about three seconds


@dataclass(frozen=True)
class Reading:
    """Puts two texts into one sequence of seq_len tokens, the longer text truncated to fit.

    An encoder reads [CLS] A [SEP] B [SEP], and a decoder A and B with an end-of-text token each,
    behind the begin-of-text token if its tokenizer puts one before a text.
    """

    seq_len: int
    special: SpecialIds
    two_stacks: bool = False  # an encoder reads the sequence, and a decoder one token later

    def sequence(self, a: NDArray[np.int64], b: NDArray[np.int64]) -> Arrays:
        """Returns tokens, valid and, for encoders, segments [seq_len]; and at []."""
        ids, n_first = self.joined(a.tolist(), b.tolist())
        tokens = np.array(ids, dtype=np.int64)
        sample = {
            **read_by(tokens, self.seq_len, self.special, self.two_stacks),
            "at": np.array(0 if self.special.cls is not None else len(ids) - 1, dtype=np.int64),
        }
        if self.special.cls is not None:
            of_b = first(len(ids), self.seq_len) & ~first(n_first, self.seq_len)
            sample["segments"] = of_b.astype(np.int64)
        return sample

    def joined(self, a: Sequence[int], b: Sequence[int] = ()) -> tuple[list[int], int]:
        """Returns the tokens of a sequence, and how many belong to the first text."""
        special, encoder = self.special, self.special.cls is not None
        before = [*special.begin] if special.cls is None else [special.cls]
        if not encoder and list(a[: len(before)]) == before:
            before = []  # the document already begins with it, see `prepare --bos`
        between = special.sep if special.sep is not None and encoder else special.eos
        # transformers takes the last token that is not padding. If texts end with the token that
        # also pads, that is the token before it, so none is put there.
        ends = encoder or special.eos != special.pad or not len(before) + len(a) + len(b)
        behind = [between] * ends
        room = self.seq_len - len(before) - len(behind) - bool(b)
        n_a, n_b = truncated(len(a), len(b), room)
        ids = [*before, *a[:n_a], *([between, *b[:n_b]] if b else []), *behind]
        return ids, len(before) + n_a + 1


@dataclass(eq=False)
class TextExamples(Samples):
    """A text, or a pair of texts, and its label, or its value for regression."""

    split: TokenSplit
    reading: Reading
    wanted: str = LABELS  # the column of the head's targets

    def __post_init__(self) -> None:
        self.n_samples = self.split.n_documents
        self.dtype = np.float32 if self.wanted == VALUE else np.int64

    def sample(self, number: int, draw: np.random.Generator) -> Arrays:
        """Returns what `Reading.sequence` returns, and labels [], the head's targets."""
        ids = self.split.document(number)[:-1]  # without the end-of-text token
        parts = self.split.columns.get(PARTS)
        n_a = int(parts[number][0]) if parts is not None else len(ids)
        wanted = np.array(self.split.columns[self.wanted][number], dtype=self.dtype)
        return self.reading.sequence(ids[:n_a], ids[n_a:]) | {LABELS: wanted}


@dataclass(eq=False)
class LabeledDocuments(Samples):
    """Documents for a language model that also classifies them, truncated to seq_len.

    A decoder reads the document and its end-of-text token, and classifies it by its last token,
    which sees all others. An encoder reads [CLS] document [SEP] with masked words, and classifies
    it by its [CLS].
    """

    split: TokenSplit
    seq_len: int
    special: SpecialIds

    def __post_init__(self) -> None:
        self.masking = None if self.special.mask is None else Masking(self.special)
        self.n_samples = self.split.n_documents

    def sample(self, number: int, draw: np.random.Generator) -> Arrays:
        """Returns tokens, targets, valid and, for encoders, segments [seq_len]; at and labels [].

        The targets are the next tokens, or the masked words.
        """
        start, length = int(self.split.offsets[number]), self.split.document_length(number)
        if self.masking is None:
            ids = self.split.window(start, start + min(self.seq_len + 1, length))
            tokens, targets = ids[: self.seq_len], ids[1:]
        else:  # without the end-of-text token
            ids = self.split.window(start, start + min(self.seq_len - 2, length - 1))
            read, said = self.masking.hide(ids, draw)
            ends = (self.special.cls, self.special.sep)
            tokens = np.concatenate([ends[:1], read, ends[1:]]).astype(np.int64)
            targets = np.concatenate([[IGNORE], said, [IGNORE]])
        sample = {
            "tokens": padded(tokens, self.seq_len, self.special.pad),
            "targets": padded(targets, self.seq_len, IGNORE),
            "valid": first(len(tokens), self.seq_len),
        }
        if self.masking is not None:
            sample["segments"] = np.zeros(self.seq_len, dtype=np.int64)
        at = 0 if self.masking is not None else len(tokens) - 1
        label = self.split.columns[LABELS][number]
        return sample | {"at": np.array(at, np.int64), LABELS: np.array(label, np.int64)}


@dataclass(eq=False)
class ChoiceExamples(Samples):
    """A passage with n continuations, each a sequence of its own, and which of them is right."""

    split: TokenSplit
    reading: Reading
    n_choices: int

    def __post_init__(self) -> None:
        self.n_samples, n = self.split.n_documents, self.split.columns[PARTS].shape[1] - 1
        if n != self.n_choices:
            raise DataError(
                f"{self.split.path}: its questions have {n} choices, not data.n_choices="
                f"{self.n_choices}: use data.n_choices={n}"
            )

    @cached_property
    def n_alike(self) -> int:
        """How many questions, at least, have choices that are equal once they are truncated."""
        parts = np.asarray(self.split.columns[PARTS], dtype=np.int64)
        passages, choices, most = parts[:, :1], parts[:, 1:], self.reading.seq_len - 5
        cut = ((passages + choices > most) & (2 * choices > most)).any(1)
        draw, n_alike = np.random.default_rng(0), 0
        for number in np.flatnonzero(cut)[:_MOST_COMPARED].tolist():
            read = self.sample(number, draw)
            n_alike += len(np.unique(read.get("source", read["tokens"]), axis=0)) < self.n_choices
        return n_alike

    def sample(self, number: int, draw: np.random.Generator) -> Arrays:
        """Returns what `Reading.sequence` returns for each continuation [n, ...], and labels []."""
        ids = self.split.document(number)[:-1]
        ends = np.cumsum(self.split.columns[PARTS][number])
        passage = ids[: ends[0]]
        choices = [ids[begin:end] for begin, end in pairwise(ends)]
        read = [self.reading.sequence(passage, choice) for choice in choices]
        return stacked(read) | {LABELS: np.array(self.split.columns[RIGHT][number], dtype=np.int64)}


class ContextWindow(NamedTuple):
    """One window of a context."""

    document: int  # the number of the question
    start: int  # the first token of the context in it
    length: int  # tokens of the context
    place: int  # the position of its first token of the context in the sequence


@dataclass(eq=False)
class AnswerExamples(Samples):
    """The windows of all questions: [CLS] question [SEP] context [SEP].

    For decoders and encoder-decoder pairs all three are the end-of-text token, or the first one is
    what the tokenizer puts before a text. A context that is too long is read in several windows,
    which are samples of their own (Devlin et al. 2019, section 4.2). The answer of a window that
    does not hold all of it is the first token, and so is the answer to a question without one.
    """

    split: TokenSplit
    seq_len: int
    special: SpecialIds
    stride: int  # tokens from the beginning of a window to that of the next
    evaluating: bool = False  # whether samples tell where answers may be, in the key `context`
    two_stacks: bool = False

    def __post_init__(self) -> None:
        special = self.special
        cls = special.eos if special.cls is None else special.cls
        self.before = [*special.begin] or [cls]
        self.sep = special.eos if special.sep is None else special.sep
        parts = np.asarray(self.split.columns[PARTS], dtype=np.int64)
        self.n_context = parts[:, 1]
        most = self.seq_len - len(self.before) - 2  # without special tokens
        self.n_question = np.minimum(parts[:, 0], min(MOST_QUESTION, most // 2))
        self.room = most - self.n_question  # for tokens of the context
        self.step = np.minimum(self.room, self.stride)
        more = np.maximum(0, self.n_context - self.room)
        # The first window of each question, and the number of all windows.
        self.firsts = np.concatenate([[0], np.cumsum(1 - (-more // self.step))])
        self.n_samples = int(self.firsts[-1])

    def window(self, number: int) -> ContextWindow:
        """Returns the window that is a sample."""
        document = int(np.searchsorted(self.firsts, number, side="right")) - 1
        start = (number - int(self.firsts[document])) * int(self.step[document])
        length = min(int(self.n_context[document]) - start, int(self.room[document]))
        place = len(self.before) + int(self.n_question[document]) + 1
        return ContextWindow(document, start, length, place)

    def sample(self, number: int, draw: np.random.Generator) -> Arrays:
        """Returns what `read_by` returns, segments (and context) [seq_len], and answer [2]."""
        window = self.window(number)
        ids = self.split.document(window.document)
        question = ids[: int(self.n_question[window.document])]
        begin = int(self.split.columns[PARTS][window.document][0]) + window.start
        context = ids[begin : begin + window.length]
        tokens = np.concatenate([self.before, question, [self.sep], context, [self.sep]])
        sample = read_by(tokens.astype(np.int64), self.seq_len, self.special, self.two_stacks)
        sample["answer"] = self._answer(window)
        if self.special.cls is not None:
            of_context = first(len(tokens), self.seq_len) & ~first(window.place, self.seq_len)
            sample["segments"] = of_context.astype(np.int64)
        if self.evaluating:
            sample["context"] = self._context(number, window)
        return sample

    def _answer(self, window: ContextWindow) -> NDArray[np.int64]:
        low, high = (int(n) for n in self.split.columns[ANSWER][window.document])
        if low < window.start or high >= window.start + window.length:
            return np.zeros(2, dtype=np.int64)
        return np.array([low, high], dtype=np.int64) - window.start + window.place

    def _context(self, number: int, window: ContextWindow) -> NDArray[np.int64]:
        """Returns where an answer may end (1), and where it may also begin (2) [seq_len]."""
        # It begins in the first of the windows with the most context around its first token.
        place = np.arange(window.start, window.start + window.length)
        begin, end = self.firsts[window.document : window.document + 2].tolist()
        scores = [_score(self.window(other), place) for other in range(begin, end)]
        allowed = np.zeros(self.seq_len, dtype=np.int64)
        begins = np.argmax(scores, axis=0) == number - begin
        allowed[window.place : window.place + window.length] = 1 + begins
        return allowed


def read_by(ids: NDArray[np.int64], seq_len: int, special: SpecialIds, two_stacks: bool) -> Arrays:
    """Returns the keys of a batch that hold a sequence, which padding makes seq_len long."""
    tokens, valid = padded(ids, seq_len, special.pad), first(len(ids), seq_len)
    if not two_stacks:
        return {"tokens": tokens, "valid": valid}
    later = np.concatenate([[special.start], tokens[:-1]])
    return {"tokens": later, "source": tokens, "source_valid": valid}


def truncated(n_a: int, n_b: int, room: int) -> tuple[int, int]:
    """Returns how many tokens of two texts are kept, as in Devlin et al. 2019's code.

    The longer one gives up one after the other, and of two that are equally long the second one.
    """
    excess = max(0, n_a + n_b - room)
    longer = min(excess, abs(n_a - n_b))
    if n_a > n_b:
        n_a -= longer
    else:
        n_b -= longer
    both = excess - longer
    return n_a - both // 2, n_b - (both - both // 2)


def _score(window: ContextWindow, place: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns how much context a window has around tokens; -1 where it does not hold them."""
    # The smaller number of tokens on both sides, and the window's length, as in the original code.
    left, right = place - window.start, window.start + window.length - 1 - place
    score = np.minimum(left, right) + 0.01 * window.length
    return np.where((left >= 0) & (right >= 0), score, -1.0)
