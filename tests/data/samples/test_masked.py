"""Masked words and spans: how many are hidden, what replaces them, and which sentence follows."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridformer.data.samples import masked
from gridformer.data.samples.sample import SpecialIds
from gridformer.utils.batch import IGNORE
from gridformer.utils.errors import DataError
from tests.support.data import counting_split

N = 20_000
SPECIAL = SpecialIds(7, N, N + 1, N + 2, N + 3, 7, (), N + 4, N, frozenset({7, 9}))
_MARKS = tuple(range(N + 1, N + 401))
SPANS = SpecialIds(0, N, None, None, None, N, _MARKS, N + 401, N, frozenset({0}))


def test_rates() -> None:
    draw = np.random.default_rng(0)
    ids = draw.integers(N, size=(400, 128))
    counts = {"mask": 0, "same": 0, "random": 0}
    masking, hidden_in_all = masked.Masking(SPECIAL), 0
    for row in ids:
        tokens, targets = masking.hide(row, draw)
        hidden = targets != IGNORE
        words = ~np.isin(row, [7, 9])
        assert not (hidden & ~words).any()
        assert hidden.sum() == (15 * words.sum() + 50) // 100
        assert np.array_equal(targets[hidden], row[hidden])
        assert np.array_equal(tokens[~hidden], row[~hidden])
        hidden_in_all += int(hidden.sum())
        read = tokens[hidden]
        counts["mask"] += int((read == SPECIAL.mask).sum())
        counts["same"] += int((read == row[hidden]).sum())
        other = read[(read != SPECIAL.mask) & (read != row[hidden])]
        assert not np.isin(other, [7, 9]).any()
        counts["random"] += len(other)
    shares = {name: count / hidden_in_all for name, count in counts.items()}
    # Four standard deviations of a fraction of 7600 words.
    assert shares == pytest.approx({"mask": 0.8, "same": 0.1, "random": 0.1}, abs=0.02)


@given(ids=st.lists(st.sampled_from([7, 9, 1, 2, 3]), min_size=1, max_size=40), seed=st.integers(0))
def test_at_least_one_and_never_a_special_one(ids: list[int], seed: int) -> None:
    row = np.array(ids)
    _, targets = masked.Masking(SPECIAL).hide(row, np.random.default_rng(seed))
    hidden = targets != IGNORE
    assert hidden.any()
    words = ~np.isin(row, [7, 9])
    assert not words.any() or not (hidden & ~words).any()


def test_every_word_is_hidden_as_often_as_any_other() -> None:
    """Of 30 words between two ends of texts 5 are hidden, the first and last as often."""
    row = np.concatenate([[7], np.arange(100, 130), [7]])
    draw, n_draws = np.random.default_rng(0), 3000
    masking = masked.Masking(SPECIAL)
    hidden = np.mean([masking.hide(row, draw)[1] != IGNORE for _ in range(n_draws)], axis=0)
    assert hidden[0] == hidden[-1] == 0.0
    share = 5 / 30
    deviation = (share * (1 - share) / n_draws) ** 0.5
    assert np.abs(hidden[1:-1] - share).max() < 4.5 * deviation


def test_every_ordinary_word_stands_in_for_a_hidden_one() -> None:
    """With 8 words and two special tokens, the first and last words are drawn, too."""
    special = replace(SPECIAL, eos=3, ordinary_size=10, mask=10, not_words=frozenset({3, 6}))
    draw, masking = np.random.default_rng(0), masked.Masking(special)
    read = [masking.hide(np.full(100, 5), draw)[0] for _ in range(200)]
    assert set(np.concatenate(read).tolist()) == {*range(11)} - {3, 6}


def original(sample: dict[str, np.ndarray]) -> np.ndarray:
    """Return the tokens before words were hidden."""
    return np.where(sample["targets"] != IGNORE, sample["targets"], sample["tokens"])


@given(st.integers(5, 30), st.integers(2, 8), st.integers(0, 4), st.integers(0))
def test_sentences(seq_len: int, n_windows: int, rest: int, seed: int) -> None:
    n_text = seq_len - 3
    split = replace(counting_split(n_windows * n_text + min(rest, n_text - 1)), vocab_size=N)
    samples = masked.MaskedSamples(split, seq_len, SPECIAL, sentence_pair=True)
    assert samples.n_samples == n_windows
    number = seed % n_windows
    sample = samples.sample(number, np.random.default_rng(seed))
    ids = original(sample)
    (first, last) = np.flatnonzero(ids == SPECIAL.sep)
    assert ids[0] == SPECIAL.cls
    assert last == seq_len - 1
    a, b = ids[1:first], ids[first + 1 : last]
    assert min(len(a), len(b)) >= 1
    # The split counts up, so a token shows where it was read.
    assert np.array_equal(a, number * n_text + np.arange(len(a)))
    assert np.array_equal(b, b[0] + np.arange(len(b)))
    if sample["pair"]:
        assert b[0] == a[-1] + 1
    else:
        assert b[-1] < number * n_text or b[0] >= (number + 1) * n_text
    assert sample["segments"].tolist() == [0] * (first + 1) + [1] * (len(b) + 1)
    assert (sample["targets"][np.array([0, first, last])] == IGNORE).all()


@pytest.mark.parametrize("number", [0, 1, 3])
def test_sentences_from_elsewhere_come_from_everywhere_else(number: int) -> None:
    """For each length of B, every place that does not touch the sample's own 5 tokens is drawn.

    The very first and last places are included; the test counts the places one by one.
    """
    n_text, n_tokens = 5, 22
    split = replace(counting_split(n_tokens), vocab_size=N)
    samples = masked.MaskedSamples(split, n_text + 3, SPECIAL, sentence_pair=True)
    own = set(range(number * n_text, (number + 1) * n_text))
    want = {
        (start, length)
        for length in range(1, n_text)
        for start in range(n_tokens - length + 1)
        if not own & set(range(start, start + length))
    }
    found, draw = set(), np.random.default_rng(0)
    for _ in range(4000):
        sample = samples.sample(number, draw)
        if not sample["pair"]:
            (first, last) = np.flatnonzero(original(sample) == SPECIAL.sep)
            found.add((int(original(sample)[first + 1]), int(last - first - 1)))
    assert found == want


def test_half_of_the_sentences_follow() -> None:
    samples = masked.MaskedSamples(replace(counting_split(900), vocab_size=N), 12, SPECIAL, True)
    draw = np.random.default_rng(0)
    drawn = [samples.sample(i % 100, draw) for i in range(1000)]
    follows = np.mean([sample["pair"] for sample in drawn])
    assert follows == pytest.approx(0.5, abs=0.06)
    lengths = {int(sample["segments"].sum()) for sample in drawn}
    assert lengths == set(range(2, 10))  # B with its [SEP]: every length from 1 to 8


def test_one_sentence() -> None:
    samples = masked.MaskedSamples(replace(counting_split(95), vocab_size=N), 12, SPECIAL, False)
    assert samples.n_samples == 9
    sample = samples.sample(3, np.random.default_rng(0))
    assert original(sample).tolist() == [SPECIAL.cls, *range(30, 40), SPECIAL.sep]
    assert "pair" not in sample
    assert not sample["segments"].any()


def test_too_short_names_a_length_that_works() -> None:
    split = replace(counting_split(15), vocab_size=N)
    with pytest.raises(DataError, match=r"data.seq_len of at most 10, or prepare more text"):
        masked.MaskedSamples(split, 11, SPECIAL, sentence_pair=True)
    assert masked.MaskedSamples(split, 10, SPECIAL, sentence_pair=True).n_samples == 2
    with pytest.raises(DataError, match=r"data.seq_len of at most 17"):
        masked.MaskedSamples(split, 18, SPECIAL, sentence_pair=False)
    assert masked.MaskedSamples(split, 17, SPECIAL, sentence_pair=False).n_samples == 1


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
    n = masked.window_length(source_len)
    window = np.arange(1, n + 1)
    source, target = masked.corrupted(window, SPANS, np.random.default_rng(seed))
    assert reassembled(source, target) == window.tolist()
    assert len(source) == source_len
    assert len(target) == masked.target_length(source_len)
    assert source[-1] == target[-1] == SPANS.eos
    assert source.dtype == target.dtype == np.int64
    # Sentinels come in order; the text begins with kept words and ends with a span.
    used = list(SPANS.sentinels[: masked.sentinels_of(source_len)])
    assert source[source > N].tolist() == target[target > N].tolist() == used
    assert source[0] == 1
    assert target[-2] == n


@given(n=st.integers(2, 5000))
def test_noise(n: int) -> None:
    noise, spans = masked.noise_of(n)
    assert 1 <= spans <= min(noise, n - noise)
    if n > 100:
        assert noise == pytest.approx(0.15 * n, abs=0.51)
        assert noise / spans == pytest.approx(3, abs=0.5)


def test_published_lengths() -> None:
    """A source of 512 tokens takes 568 of text and a target of 114, as in T5's own code."""
    assert masked.window_length(512) == 568
    assert masked.target_length(512) == 114


def test_every_way_of_cutting_is_equally_likely() -> None:
    """Of 40 tokens, 34 are kept in 2 stretches and 6 are noise in 2 spans, all non-empty.

    The test counts all ways of splitting them, including the first and the last.
    """
    draw, n_draws = np.random.default_rng(0), 6000
    assert masked.noise_of(40) == (6, 2)
    kept, noise = np.zeros(34), np.zeros(6)
    for _ in range(n_draws):
        source, target = masked.corrupted(np.arange(1, 41), SPANS, draw)
        kept[np.flatnonzero(source > N)[0]] += 1
        noise[np.flatnonzero(target > N)[1] - 1] += 1
    for counts, n_ways in ((kept, 33), (noise, 5)):
        assert counts[0] == 0
        share = 1 / n_ways
        deviation = (share * (1 - share) / n_draws) ** 0.5
        assert np.abs(counts[1:] / n_draws - share).max() < 4.5 * deviation


def test_too_short_for_spans() -> None:
    with pytest.raises(DataError, match=r"which takes 44: use a smaller data.source_len, or prep"):
        masked.SpanSamples(counting_split(43), 40, 20, SPANS)
