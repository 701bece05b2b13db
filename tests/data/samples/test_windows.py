"""Batches of windows: what they contain, and that only (seed, step) decides it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridformer.data import TokenSplit
from gridformer.data.samples.batches import ShuffledBatches
from gridformer.data.samples.order import Order, Rows
from gridformer.data.samples.texts import WindowSamples
from gridformer.utils.errors import DataError
from tests.support.data import counting_split


class Windows:
    """Batches of windows, with the last target beside the tokens."""

    def __init__(self, split: TokenSplit, seq_len: int, global_batch: int, seed: int = 0) -> None:
        samples = WindowSamples(split, seq_len)
        self.n_samples = samples.n_samples
        self.order = Order.of_one(samples.n_samples, global_batch, seed)
        self.batches = ShuffledBatches((samples,), self.order, "test")

    def indices(self, step: int) -> np.ndarray:
        return self.order.places(step)[1]

    def batch(self, step: int, rows: Rows | None = None) -> np.ndarray:
        found = self.batches.batch(step, rows)
        assert np.array_equal(found["tokens"][:, 1:], found["targets"][:, :-1])
        return np.concatenate([found["tokens"], found["targets"][:, -1:]], axis=1)


sizes = st.tuples(st.integers(1, 400), st.integers(1, 12), st.integers(1, 40)).filter(
    lambda size: size[0] > size[1]
)


@given(size=sizes, seed=st.integers(0, 2**63 - 1), step=st.integers(0, 10**9))
def test_rows_are_windows_with_their_targets(
    size: tuple[int, int, int], seed: int, step: int
) -> None:
    n_tokens, seq_len, global_batch = size
    sampler = Windows(counting_split(n_tokens), seq_len, global_batch, seed)
    batch = sampler.batch(step)
    assert batch.shape == (global_batch, seq_len + 1)
    assert batch.dtype == np.int64
    assert np.array_equal(batch[:, 0], sampler.indices(step) * seq_len)
    assert np.array_equal(batch, batch[:, :1] + np.arange(seq_len + 1))
    # The last sample has its last target, and no further sample would fit.
    assert sampler.n_samples * seq_len + 1 <= n_tokens < (sampler.n_samples + 1) * seq_len + 1


def test_seeds_and_epochs_shuffle_differently() -> None:
    split = counting_split(1001)
    a, b = (Windows(split, 10, 100, seed) for seed in (1, 2))
    orders = [a.indices(0), a.indices(1), b.indices(0)]
    for i, order in enumerate(orders):
        assert not any(np.array_equal(order, other) for other in orders[:i])


def test_reads_only_the_rows_asked_for() -> None:
    """All other tokens are outside the vocabulary, which raises an error when they are read."""
    sampler = Windows(counting_split(1001), 10, 16, seed=0)
    want = sampler.batch(2, slice(4, 7))
    tokens = np.full(1001, 1001)
    tokens[want] = want
    damaged = Windows(replace(counting_split(1001), tokens=tokens), 10, 16, seed=0)
    assert np.array_equal(damaged.batch(2, slice(4, 7)), want)
    with pytest.raises(DataError, match="outside the vocabulary"):
        damaged.batch(2, slice(3, 7))
    assert sampler.batch(2, slice(3, 3)).shape == (0, 11)


@pytest.mark.parametrize("n_tokens", [0, 1, 10])
def test_too_short_names_a_length_that_works(n_tokens: int) -> None:
    with pytest.raises(DataError, match="prepare more text") as error:
        Windows(counting_split(n_tokens), 10, 4)
    assert "data.seq_len=10, which takes 11" in str(error.value)
    if n_tokens == 10:
        assert "use data.seq_len of at most 9" in str(error.value)
        assert Windows(counting_split(10), 9, 4).n_samples == 1


def test_too_short_validation_suggests_a_larger_fraction() -> None:
    with pytest.raises(DataError, match="larger --val-fraction"):
        Windows(counting_split(5, "val"), 10, 4)


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    split = replace(counting_split(101), vocab_size=50)
    with pytest.raises(DataError, match="outside the vocabulary of 50"):
        Windows(split, 10, 10).batch(0)
    with pytest.raises(DataError, match="contains token 60 outside"):  # the first window's largest
        split.windows(np.array([10, 50, 80]), 11)
