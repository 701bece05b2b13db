"""Masked spans: T5's samples (Raffel et al. 2020, section 3.1.4).

15% of a window of running text is noise, in spans of 3 tokens on average. In the source a sentinel
replaces each span; the target has each sentinel followed by its span. Both end with the end-of-text
token. Their lengths depend only on the window's length, so all samples have the same lengths.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gridformer.data.samples.samples import Arrays, more_text, padded
from gridformer.data.samples.special import SpecialIds
from gridformer.data.tokenfolder import TokenSplit
from gridformer.utils.batch import IGNORE
from gridformer.utils.errors import DataError

NOISE_PERCENT = 15
SPAN_TOKENS = 3  # average length of a span
SHORTEST_SOURCE = 3  # one token, one sentinel, end of text


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
    while _source_of(n_tokens + 1) <= source_len:
        n_tokens += 1
    return n_tokens


def target_length(source_len: int) -> int:
    """Returns the length of the target, end of text included, for source_len >= 3 tokens."""
    return sum(noise_of(window_length(source_len))) + 1


def sentinels_of(source_len: int) -> int:
    """Returns how many sentinels a source of source_len tokens has."""
    return noise_of(window_length(source_len))[1]


class SpanSamples:
    """Samples of masked spans.

    Sample i is made from tokens [i*n, (i+1)*n) of the split, where n = window_length(source_len).

    Raises:
        DataError: The split is too short for a single sample.
    """

    def __init__(
        self, split: TokenSplit, source_len: int, seq_len: int, special: SpecialIds
    ) -> None:
        self.split, self.source_len, self.seq_len = split, source_len, seq_len
        self.special = special
        self.n_window = window_length(source_len)
        self.noise, self.spans = noise_of(self.n_window)
        assert seq_len >= target_length(source_len)
        assert len(special.sentinels) >= self.spans
        self.n_samples = split.n_tokens // self.n_window
        if not self.n_samples:
            raise DataError(
                f"{split.path}: {split.n_tokens} tokens hold no sample of data.source_len="
                f"{source_len}, which takes {self.n_window}: use a smaller data.source_len, or "
                f"{more_text(split)}"
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

    Args:
        window: Token ids, int64 [n].
        special: The ids of sentinels, one for each span of noise, and of the end of text.
        draw: Random numbers that decide the lengths of the spans.
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


def _source_of(n_tokens: int) -> int:
    noise, spans = noise_of(n_tokens)
    return n_tokens - noise + spans + 1
