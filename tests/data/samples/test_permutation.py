"""The shuffle that needs no table."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridformer.data.samples.order import permute


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 2**40))
def test_is_a_bijection(n: int, seed: int, epoch: int) -> None:
    image = permute(np.arange(n), n, seed, epoch)
    assert np.array_equal(np.sort(image), np.arange(n))


@given(
    n=st.integers(1, 2**62),
    seed=st.integers(0, 2**63 - 1),
    data=st.data(),
)
def test_large_domains_map_distinct_positions_to_distinct_places(
    n: int, seed: int, data: st.DataObject
) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=50))
    image = permute(np.array(positions, dtype=np.int64), n, seed, 0)
    assert len(set(image.tolist())) == len(positions)
    assert all(0 <= place < n for place in image.tolist())


@given(n=st.integers(2, 2000), seed=st.integers(0, 2**63 - 1))
def test_each_position_alone_as_in_the_whole(n: int, seed: int) -> None:
    whole = permute(np.arange(n), n, seed, 3)
    alone = [int(permute(np.array([i]), n, seed, 3)[0]) for i in range(0, n, max(1, n // 20))]
    assert alone == whole[:: max(1, n // 20)].tolist()


def test_shuffles() -> None:
    n, epochs = 50, 4000
    images = np.stack([permute(np.arange(n), n, 7, epoch) for epoch in range(epochs)])
    # Over many epochs, the place of position 0, and whether neighbors stay in order, are within
    # five standard deviations of a fair shuffle.
    counts = np.bincount(images[:, 0], minlength=n)
    assert np.abs(counts - epochs / n).max() < 5 * np.sqrt(epochs / n)
    rises = (images[:, :-1] < images[:, 1:]).mean(axis=0)
    assert np.abs(rises - 0.5).max() < 5 * 0.5 / np.sqrt(epochs)
    assert len(np.unique(images, axis=0)) == epochs


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_small_domains_reach_every_order(n: int) -> None:
    orders = {tuple(permute(np.arange(n), n, 1, epoch).tolist()) for epoch in range(3000)}
    assert len(orders) == [2, 6, 24, 120][n - 2]


def test_the_order_of_the_data_never_changes() -> None:
    """A resumed run of an older version must continue in the same order: these are its numbers."""
    assert permute(np.arange(10), 10, 1234, 0).tolist() == [0, 4, 3, 8, 2, 9, 6, 1, 5, 7]
    large = permute(np.array([0, 1, 10**12 - 1]), 10**12, 1234, 5)
    assert large.tolist() == [146823573688, 840210480741, 208747988]
