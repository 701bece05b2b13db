"""The order of samples: shuffles without a table, whole epochs, exact shares, random numbers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gridformer.config.data import LONGEST_CYCLE, whole_weights
from gridformer.data.samples.batches import ShuffledBatches
from gridformer.data.samples.order import Order, Stage, cycle_of, permute
from gridformer.data.samples.sample import Arrays, Samples

WEIGHTS = st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any)


class Drawn(Samples):
    """Samples that are the random numbers they are given."""

    n_samples = 50

    def sample(self, number: int, draw: np.random.Generator) -> Arrays:
        return {"drawn": draw.integers(2**62, size=4)}


def test_random_numbers_are_of_a_place() -> None:
    def numbers(
        step: int, row: int, purpose: str = "a", size: int = 4, seed: int = 3
    ) -> tuple[int, ...]:
        batches = ShuffledBatches((Drawn(),), Order.of_one(50, size, seed), purpose)
        (drawn,) = batches.batch(step, slice(row, row + 1))["drawn"].tolist()
        return tuple(drawn)

    np.random.seed(0)
    before = np.random.get_state()[1].tolist()  # type: ignore[index]
    assert numbers(2, 1) == numbers(2, 1)
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index]
    assert len({numbers(step, row) for step in range(5) for row in range(4)}) == 20
    assert len({numbers(2, 1, "b"), numbers(2, 1), numbers(2, 1, seed=4)}) == 3
    # The place counts samples, so batches of another size use the same numbers in another
    # arrangement.
    assert numbers(1, 2, size=8) == numbers(2, 2)


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 2**40))
def test_is_a_bijection(n: int, seed: int, epoch: int) -> None:
    image = permute(np.arange(n), n, seed, epoch)
    assert np.array_equal(np.sort(image), np.arange(n))


@given(n=st.integers(1, 2**62), seed=st.integers(0, 2**63 - 1), data=st.data())
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


@st.composite
def mixtures(draw: st.DrawFn) -> Order:
    """Return a strategy of mixtures of up to five sources in up to four stages."""
    n = draw(st.integers(1, 5))
    sizes = draw(st.lists(st.integers(1, 30), min_size=n, max_size=n))
    starts = sorted(draw(st.sets(st.integers(1, 30), max_size=3)))
    weights = st.lists(st.integers(0, 12), min_size=n, max_size=n).filter(any)
    stages = [Stage(first, whole_weights(draw(weights))) for first in (0, *starts)]
    names = tuple(f"source{i}" for i in range(n))
    batch, seed = draw(st.integers(1, 9)), draw(st.integers(0, 2**63 - 1))
    return Order(names, tuple(sizes), tuple(stages), batch, seed)


def read(mixture: Order, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the sources and sample numbers of the first steps, in their order."""
    sources, numbers = zip(*(mixture.places(step) for step in range(steps)))
    return np.concatenate(sources), np.concatenate(numbers)


@given(weights=WEIGHTS)
def test_every_prefix_has_the_exact_shares_up_to_one_sample(weights: list[int]) -> None:
    cycle = cycle_of(whole_weights([float(weight) for weight in weights]))
    n = np.arange(1, 2 * cycle.length + 1)
    for i, weight in enumerate(weights):
        taken = np.cumsum(np.tile(cycle.sources == i, 2))
        lag = np.abs(taken * sum(weights) - n * weight)  # times the sum, in whole numbers
        assert (lag < (sum(weights) if weight else 1)).all()
        assert taken[cycle.length - 1] == cycle.counts[i]


@settings(max_examples=40)
@given(mixture=mixtures(), steps=st.integers(1, 40))
def test_stages_keep_their_shares_and_sources_their_epochs(mixture: Order, steps: int) -> None:
    sources, numbers = read(mixture, steps)
    ends = [stage.first_step for stage in mixture.stages[1:]] + [steps]
    for stage, end in zip(mixture.stages, ends):
        of_stage = sources[stage.first_step * mixture.global_batch : end * mixture.global_batch]
        n = np.arange(1, len(of_stage) + 1)
        for i, weight in enumerate(stage.weights):
            taken = np.cumsum(of_stage == i)
            assert (np.abs(taken - n * weight / sum(stage.weights)) < 1).all()
    for i, size in enumerate(mixture.sizes):
        mine = numbers[sources == i]
        for begin in range(0, len(mine), size):
            epoch = mine[begin : begin + size]
            assert len({*epoch.tolist()}) == len(epoch), "no sample comes twice in an epoch"
            assert ((epoch >= 0) & (epoch < size)).all()


@settings(max_examples=40)
@given(mixture=mixtures(), data=st.data())
def test_rows_and_batch_sizes_do_not_change_the_order(mixture: Order, data: st.DataObject) -> None:
    step = data.draw(st.integers(0, 10**12))
    whole = mixture.places(step)
    rows = np.array(data.draw(st.lists(st.integers(0, mixture.global_batch - 1), max_size=5)))
    for all_rows, some in zip(whole, mixture.places(step, rows.astype(np.int64))):
        assert np.array_equal(all_rows[rows.astype(np.int64)], some)
    alone = Order(mixture.names, mixture.sizes, mixture.stages[:1], 1, mixture.seed)
    batched = Order(mixture.names, mixture.sizes, mixture.stages[:1], 6, mixture.seed)
    for one, other in zip(read(alone, 30), read(batched, 5)):
        assert np.array_equal(one, other)


def test_a_step_far_away_takes_no_longer_than_the_first() -> None:
    """It is computed and not counted up to; a place beyond 2^63 is exact."""
    weights = whole_weights([0.70001, 0.2, 0.09999])
    assert sum(weights) == LONGEST_CYCLE
    stages = (Stage(0, weights), Stage(2**53, (1, 1, 1)))
    mixture = Order(("a", "b", "c"), (10**9, 7, 1), stages, 4096, seed=1)
    for step in (0, 2**53 - 1, 2**53, 2**60):
        sources, numbers = mixture.places(step)
        assert (numbers[sources == 2] == 0).all()
        assert len({*numbers[sources == 0].tolist()}) == (sources == 0).sum()
    with pytest.raises(ValueError, match="must not be negative"):
        mixture.places(-1)


def test_an_added_source_leaves_the_order_within_the_others() -> None:
    two = Order(("a", "b"), (50, 50), (Stage(0, (1, 1)),), 8, seed=3)
    three = Order(("a", "new", "b"), (50, 9, 50), (Stage(0, (1, 1, 1)),), 8, seed=3)
    (of_two, numbers), (of_three, others) = read(two, 10), read(three, 15)
    assert np.array_equal(numbers[of_two == 1], others[of_three == 2])
    assert not np.array_equal(numbers[of_two == 0], numbers[of_two == 1]), "shuffled differently"
