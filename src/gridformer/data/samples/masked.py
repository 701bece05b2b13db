"""Masked words and sentence pairs: BERT's samples (Devlin et al. 2019)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gridformer.data.samples.samples import Arrays, more_text
from gridformer.data.samples.special import SpecialIds
from gridformer.data.tokenfolder import TokenSplit
from gridformer.utils.batch import IGNORE
from gridformer.utils.errors import DataError

MASKED_PERCENT = 15  # percentage of the words that are hidden
_AS_MASK, _AS_RANDOM = 0.8, 0.1  # fractions of the hidden words; the rest stays unchanged


class Masking:
    """Hides 15% of the words of a text, at least one, and makes them the targets."""

    def __init__(self, special: SpecialIds) -> None:
        assert special.mask is not None
        self.mask = special.mask
        known = np.ones(special.ordinary_size, dtype=bool)
        known[list(special.not_words)] = False
        self.is_word = known  # [ordinary_size] bool
        self.words = np.flatnonzero(known)

    def hide(
        self, ids: NDArray[np.int64], draw: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns tokens to read and targets, both [n] int64, for a text of ids [n], n >= 1.

        80% of the hidden words become [MASK], 10% become a random word, 10% stay unchanged.

        Args:
            ids: Token ids of the text, which is not changed.
            draw: Random numbers that decide what is hidden.
        """
        # A text may consist of end-of-text tokens alone; then one of those is hidden.
        words = np.flatnonzero(self.is_word[ids])
        words = words if words.size else np.arange(len(ids))
        number = max(1, (MASKED_PERCENT * len(words) + 50) // 100)
        hidden = draw.choice(words, number, replace=False)
        tokens, targets = ids.copy(), np.full(len(ids), IGNORE, dtype=np.int64)
        targets[hidden] = ids[hidden]
        chance = draw.random(number)
        other = draw.choice(self.words, number) if self.words.size else ids[hidden]
        tokens[hidden] = np.where(
            chance < _AS_MASK,
            self.mask,
            np.where(chance < _AS_MASK + _AS_RANDOM, other, ids[hidden]),
        )
        return tokens, targets


class MaskedSamples:
    """Samples [CLS] A [SEP] B [SEP], or [CLS] A [SEP], of exactly seq_len tokens of running text.

    Sample i starts at token i*n of the split, where n is seq_len without the three or two special
    tokens. The length of A is random and leaves at least 1 token to B. Half of the time B continues
    where A ends (`pair` 1); otherwise it comes from a random position outside of this sample's own
    text (`pair` 0).

    Raises:
        DataError: The split is too short.
    """

    def __init__(
        self, split: TokenSplit, seq_len: int, special: SpecialIds, sentence_pair: bool
    ) -> None:
        assert special.cls is not None
        assert special.sep is not None
        self.split, self.seq_len, self.sentence_pair = split, seq_len, sentence_pair
        self.cls, self.sep = special.cls, special.sep
        self.masking = Masking(special)
        n_special, self._least = (3, 2) if sentence_pair else (2, 1)
        self.n_text = seq_len - n_special
        assert self.n_text >= self._least
        self.n_samples = split.n_tokens // self.n_text
        if self.n_samples < self._least:  # a B from elsewhere needs text outside of the sample
            fits = split.n_tokens // self._least + n_special
            raise DataError(
                f"{split.path}: {split.n_tokens} tokens are too few for data.seq_len={seq_len}, "
                f"which takes {self._least * self.n_text}: use data.seq_len of at most {fits}, or "
                f"{more_text(split)}"
            )

    def sample(self, number: int, draw: np.random.Generator) -> Arrays:
        """Returns tokens, targets and segments [seq_len], and pair [] with sentence_pair."""
        start = number * self.n_text
        n_a = int(draw.integers(1, self.n_text)) if self.sentence_pair else self.n_text
        a = self.split.window(start, start + n_a)
        if not self.sentence_pair:
            return self._assembled(a, None, draw)
        follows = bool(draw.integers(2))
        n_b = self.n_text - n_a
        b_start = start + n_a if follows else self._elsewhere(start, n_b, draw)
        b = self.split.window(b_start, b_start + n_b)
        return self._assembled(a, b, draw) | {"pair": np.array(int(follows), dtype=np.int64)}

    def _elsewhere(self, start: int, length: int, draw: np.random.Generator) -> int:
        """Draws a start for `length` tokens before or after the sample's own text."""
        end = start + self.n_text
        before = max(0, start - length + 1)
        after = max(0, self.split.n_tokens - length - end + 1)
        place = int(draw.integers(before + after))
        return place if place < before else end + place - before

    def _assembled(
        self, a: NDArray[np.int64], b: NDArray[np.int64] | None, draw: np.random.Generator
    ) -> Arrays:
        text = a if b is None else np.concatenate([a, b])
        read, said = self.masking.hide(text, draw)
        tokens = np.full(self.seq_len, self.sep, dtype=np.int64)
        targets = np.full(self.seq_len, IGNORE, dtype=np.int64)
        segments = np.zeros(self.seq_len, dtype=np.int64)
        tokens[0] = self.cls
        where = np.arange(1, len(text) + 1)
        if b is not None:
            where[len(a) :] += 1  # past the [SEP] between them
            segments[len(a) + 2 :] = 1
        tokens[where], targets[where] = read, said
        return {"tokens": tokens, "targets": targets, "segments": segments}
