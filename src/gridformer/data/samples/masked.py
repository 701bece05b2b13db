"""Samples with hidden text: masked words for BERT (Devlin et al. 2019), masked spans for T5."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gridformer.data.samples.sample import Arrays, Samples, SpecialIds, more_text, padded
from gridformer.data.tokenfolder import TokenSplit
from gridformer.utils.batch import IGNORE
from gridformer.utils.errors import DataError

MASKED_PERCENT = 15  # percentage of the words that are hidden
_AS_MASK, _AS_RANDOM = 0.8, 0.1  # fractions of the hidden words; the rest stays unchanged
NOISE_PERCENT = 15  # percentage of a window's tokens that are in masked spans
SPAN_TOKENS = 3  # average length of a span
SHORTEST_SOURCE = 3  # one token, one sentinel, end of text


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


@dataclass(eq=False)
class MaskedSamples(Samples):
    """Samples [CLS] A [SEP] B [SEP], or [CLS] A [SEP], of exactly seq_len tokens of running text.

    Sample i starts at token i*n of the split, where n is seq_len without the three or two special
    tokens. The length of A is random and leaves at least 1 token to B. Half of the time B continues
    where A ends (`pair` 1); otherwise it comes from a random position outside of this sample's own
    text (`pair` 0).
    """

    split: TokenSplit
    seq_len: int
    special: SpecialIds
    sentence_pair: bool

    def __post_init__(self) -> None:
        self.masking, n_tokens = Masking(self.special), self.split.n_tokens
        n_special, least = (3, 2) if self.sentence_pair else (2, 1)
        self.n_text = self.seq_len - n_special
        assert self.n_text >= least
        self.n_samples = n_tokens // self.n_text
        if self.n_samples < least:  # a B from elsewhere needs text outside of the sample
            raise DataError(
                f"{self.split.path}: {n_tokens} tokens are too few for data.seq_len="
                f"{self.seq_len}, which takes {least * self.n_text}: use data.seq_len of at most "
                f"{n_tokens // least + n_special}, or {more_text(self.split)}"
            )

    def sample(self, number: int, draw: np.random.Generator) -> Arrays:
        """Returns tokens, targets and segments [seq_len], and pair [] with sentence_pair."""
        start = number * self.n_text
        n_a = int(draw.integers(1, self.n_text)) if self.sentence_pair else self.n_text
        text, pair = self.split.window(start, start + n_a), {}
        if self.sentence_pair:
            follows = bool(draw.integers(2))
            n_b = self.n_text - n_a
            b_start = start + n_a if follows else self._elsewhere(start, n_b, draw)
            text = np.concatenate([text, self.split.window(b_start, b_start + n_b)])
            pair = {"pair": np.array(int(follows), dtype=np.int64)}
        read, said = self.masking.hide(text, draw)
        tokens = np.full(self.seq_len, self.special.sep, dtype=np.int64)
        targets = np.full(self.seq_len, IGNORE, dtype=np.int64)
        segments = np.zeros(self.seq_len, dtype=np.int64)
        assert self.special.cls is not None
        tokens[0] = self.special.cls
        where = np.arange(1, len(text) + 1)
        if self.sentence_pair:
            where[n_a:] += 1  # past the [SEP] between them
            segments[n_a + 2 :] = 1
        tokens[where], targets[where] = read, said
        return {"tokens": tokens, "targets": targets, "segments": segments, **pair}

    def _elsewhere(self, start: int, length: int, draw: np.random.Generator) -> int:
        """Draws a start for `length` tokens before or after the sample's own text."""
        end = start + self.n_text
        before = max(0, start - length + 1)
        after = max(0, self.split.n_tokens - length - end + 1)
        place = int(draw.integers(before + after))
        return place if place < before else end + place - before


def noise_of(n_tokens: int) -> tuple[int, int]:
    """Returns how many noise tokens and spans a window of n_tokens >= 2 has."""
    noise = min(max(1, (NOISE_PERCENT * n_tokens + 50) // 100), n_tokens - 1)
    spans = max(1, (2 * noise + SPAN_TOKENS) // (2 * SPAN_TOKENS))
    return noise, min(spans, n_tokens - noise)


def window_length(source_len: int) -> int:
    """Returns the length of the longest window whose source has exactly source_len >= 3 tokens."""
    assert source_len >= SHORTEST_SOURCE
    n_tokens = 2
    # One token more makes the source longer by one or not at all, so this skips no source length.
    while True:
        noise, spans = noise_of(n_tokens + 1)
        if n_tokens + 1 - noise + spans + 1 > source_len:
            return n_tokens
        n_tokens += 1


def target_length(source_len: int) -> int:
    """Returns the length of the target, end of text included, for source_len >= 3 tokens."""
    return sum(noise_of(window_length(source_len))) + 1


def sentinels_of(source_len: int) -> int:
    """Returns how many sentinels a source of source_len tokens has."""
    return noise_of(window_length(source_len))[1]


@dataclass(eq=False)
class SpanSamples(Samples):
    """Samples of masked spans (Raffel et al. 2020, section 3.1.4).

    Sample i is made from tokens [i*n, (i+1)*n) of the split, where n = window_length(source_len).
    Of these 15% is noise, in spans of 3 tokens on average. In the source a sentinel replaces each
    span; the target has each sentinel followed by its span. Both end with the end-of-text token.
    """

    split: TokenSplit
    source_len: int
    seq_len: int
    special: SpecialIds

    def __post_init__(self) -> None:
        self.n_window, n_tokens = window_length(self.source_len), self.split.n_tokens
        assert self.seq_len >= target_length(self.source_len)
        assert len(self.special.sentinels) >= sentinels_of(self.source_len)
        self.n_samples = n_tokens // self.n_window
        if not self.n_samples:
            raise DataError(
                f"{self.split.path}: {n_tokens} tokens hold no sample of data.source_len="
                f"{self.source_len}, which takes {self.n_window}: use a smaller data.source_len, "
                f"or {more_text(self.split)}"
            )

    def sample(self, number: int, draw: np.random.Generator) -> Arrays:
        """Returns source [source_len]; tokens and targets [seq_len]."""
        window = self.split.window(number * self.n_window, (number + 1) * self.n_window)
        source, target = corrupted(window, self.special, draw)
        tokens = np.concatenate([[self.special.start], target[:-1]])
        return {
            "source": source,
            "tokens": padded(tokens, self.seq_len, self.special.pad),
            "targets": padded(target, self.seq_len, IGNORE),
        }


def corrupted(
    window: NDArray[np.int64], special: SpecialIds, draw: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns source and target, both int64, of a window [n], n >= 2.

    A window begins with text that is kept and ends with noise.
    """
    noise, spans = noise_of(len(window))
    kept_lengths = _parts(len(window) - noise, spans, draw)
    noise_lengths = _parts(noise, spans, draw)
    ends = np.stack([kept_lengths, noise_lengths], axis=1).ravel().cumsum()
    source, target = [], []
    pieces = np.split(window, ends[:-1])
    for sentinel, kept, lost in zip(special.sentinels, pieces[::2], pieces[1::2]):
        source += [kept, [sentinel]]
        target += [[sentinel], lost]
    return np.concatenate([*source, [special.eos]]), np.concatenate([*target, [special.eos]])


def _parts(total: int, number: int, draw: np.random.Generator) -> NDArray[np.int64]:
    """Draws `number` lengths >= 1 that add up to `total`, all such lengths equally likely."""
    cuts = np.sort(draw.choice(total - 1, number - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))
