"""Samples of question answering: a question and a window of the context in which its answer is.

A sequence is [CLS] question [SEP] context [SEP]. For decoders and encoder-decoder pairs all three
are the end-of-text token, or the first one is what the tokenizer puts before a text. A context that
is too long is read in several windows, which are samples of their own (Devlin et al. 2019, section
4.2). The answer of a window that does not hold all of it is the first token, as is that of a
question without an answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gridformer.data.samples.examples import PARTS, read_by
from gridformer.data.samples.samples import Arrays, first
from gridformer.data.samples.special import SpecialIds
from gridformer.data.tokenfolder import TokenSplit

ANSWER = "answer"  # the column of the first and last token of the answer in the context; -1 if none
MOST_QUESTION = 64  # tokens of a question that are read, as in the original code


@dataclass(frozen=True)
class ContextWindow:
    """One window of a context.

    Attributes:
        document: The number of the question.
        start: The first token of the context in it.
        length: How many tokens of the context it holds.
        place: The position of its first token of the context in the sequence.
    """

    document: int
    start: int
    length: int
    place: int


class AnswerExamples:
    """The windows of all questions.

    Args:
        split: A split of a folder of questions.
        seq_len: Tokens of a sequence.
        special: The special ids.
        stride: How many tokens a window begins after the previous one.
        evaluating: Whether samples tell where answers may be, in the key `context`.
        two_stacks: See `gridformer.data.samples.examples.Reading`.
    """

    def __init__(
        self,
        split: TokenSplit,
        seq_len: int,
        special: SpecialIds,
        stride: int,
        evaluating: bool = False,
        two_stacks: bool = False,
    ) -> None:
        self.split, self.seq_len, self.special = split, seq_len, special
        cls = special.eos if special.cls is None else special.cls
        self.before = [*special.begin] or [cls]
        self.sep = special.eos if special.sep is None else special.sep
        self.evaluating, self.two_stacks = evaluating, two_stacks
        parts = np.asarray(split.columns[PARTS], dtype=np.int64)
        self.n_context = parts[:, 1]
        n = len(self.before) + 2  # special tokens
        self.n_question = np.minimum(parts[:, 0], min(MOST_QUESTION, (seq_len - n) // 2))
        self.room = seq_len - n - self.n_question  # for tokens of the context
        self.step = np.minimum(self.room, stride)
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
        found = read_by(tokens.astype(np.int64), self.seq_len, self.special, self.two_stacks)
        found["answer"] = self._answer(window)
        if self.special.cls is not None:
            of_context = first(len(tokens), self.seq_len) & ~first(window.place, self.seq_len)
            found["segments"] = of_context.astype(np.int64)
        if self.evaluating:
            found["context"] = self._context(number, window)
        return found

    def _answer(self, window: ContextWindow) -> NDArray[np.int64]:
        low, high = (int(n) for n in self.split.columns[ANSWER][window.document])
        if low < window.start or high >= window.start + window.length:
            return np.zeros(2, dtype=np.int64)
        return np.array([low, high], dtype=np.int64) - window.start + window.place

    def _context(self, number: int, window: ContextWindow) -> NDArray[np.int64]:
        """Returns where an answer may end (1), and where it may also begin (2) [seq_len].

        An answer begins in the window that has the most context on both sides of its first token,
        or in the first of several such windows. The score of a token is the smaller number of
        tokens on its left and right in the window, plus a hundredth of the window's length, as in
        the original code.
        """
        place = np.arange(window.start, window.start + window.length)
        here = _score(window, place)
        begins = np.ones(window.length, dtype=bool)
        firsts = self.firsts[window.document : window.document + 2]
        for other in range(int(firsts[0]), int(firsts[1])):
            if other != number:
                score = _score(self.window(other), place)
                begins &= here > score if other < number else here >= score
        found = np.zeros(self.seq_len, dtype=np.int64)
        found[window.place : window.place + window.length] = 1 + begins
        return found


def _score(window: ContextWindow, place: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns how much context a window has around tokens; -1 where it does not hold them."""
    left, right = place - window.start, window.start + window.length - 1 - place
    score = np.minimum(left, right) + 0.01 * window.length
    return np.where((left >= 0) & (right >= 0), score, -1.0)
