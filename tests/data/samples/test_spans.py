"""Masked spans: lengths are fixed, and source and target together make up the text."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridformer.data.samples.masked import (
    SpanSamples,
    corrupted,
    noise_of,
    sentinels_of,
    target_length,
    window_length,
)
from gridformer.data.samples.sample import SpecialIds
from gridformer.utils.errors import DataError
from tests.support.data import counting_split

N = 10_000
SPECIAL = SpecialIds(
    eos=0,
    pad=N,
    mask=None,
    cls=None,
    sep=None,
    start=N,
    sentinels=tuple(range(N + 1, N + 401)),
    vocab_size=N + 401,
    ordinary_size=N,
    not_words=frozenset({0}),
)


def reassembled(source: np.ndarray, target: np.ndarray) -> list[int]:
    """Return the text: each sentinel in the source is replaced by what follows it in the target."""
    spans: dict[int, list[int]] = {}
    for token in target[:-1].tolist():
        if token > N:
            spans[token] = here = []
        else:
            here.append(token)
    out: list[int] = []
    for token in source[:-1].tolist():
        out += spans.pop(token) if token > N else [token]
    assert not spans
    return out


@given(source_len=st.integers(3, 1200), seed=st.integers(0))
def test_source_and_target_hold_the_text(source_len: int, seed: int) -> None:
    n = window_length(source_len)
    window = np.arange(1, n + 1)
    source, target = corrupted(window, SPECIAL, np.random.default_rng(seed))
    assert reassembled(source, target) == window.tolist()
    assert len(source) == source_len
    assert len(target) == target_length(source_len)
    assert source[-1] == target[-1] == SPECIAL.eos
    assert source.dtype == target.dtype == np.int64
    # Sentinels come in order; the text begins with kept words and ends with a span.
    used = list(SPECIAL.sentinels[: sentinels_of(source_len)])
    assert source[source > N].tolist() == target[target > N].tolist() == used
    assert source[0] == 1
    assert target[-2] == n


@given(n=st.integers(2, 5000))
def test_noise(n: int) -> None:
    noise, spans = noise_of(n)
    assert 1 <= spans <= min(noise, n - noise)
    if n > 100:
        assert noise == pytest.approx(0.15 * n, abs=0.51)
        assert noise / spans == pytest.approx(3, abs=0.5)


def test_published_lengths() -> None:
    """A source of 512 tokens takes 568 of text and a target of 114, as in T5's own code."""
    assert window_length(512) == 568
    assert target_length(512) == 114


def test_every_way_of_cutting_is_equally_likely() -> None:
    """Of 40 tokens, 34 are kept in 2 stretches and 6 are noise in 2 spans, all non-empty.

    The test counts all ways of splitting them, including the first and the last.
    """
    draw, n_draws = np.random.default_rng(0), 6000
    assert noise_of(40) == (6, 2)
    kept, noise = np.zeros(34), np.zeros(6)
    for _ in range(n_draws):
        source, target = corrupted(np.arange(1, 41), SPECIAL, draw)
        kept[np.flatnonzero(source > N)[0]] += 1
        noise[np.flatnonzero(target > N)[1] - 1] += 1
    for counts, n_ways in ((kept, 33), (noise, 5)):
        assert counts[0] == 0
        share = 1 / n_ways
        deviation = (share * (1 - share) / n_draws) ** 0.5
        assert np.abs(counts[1:] / n_draws - share).max() < 4.5 * deviation


def test_too_short() -> None:
    with pytest.raises(DataError, match=r"which takes 44: use a smaller data.source_len, or prep"):
        SpanSamples(counting_split(43), 40, 20, SPECIAL)
