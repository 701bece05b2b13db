"""Mixtures: exact shares at every prefix, whole epochs of every source, and rows of any layout."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gridformer.config.mixture import LONGEST_CYCLE, whole_weights
from gridformer.data.samples.mixture import Mixture, Stage, cycle_of

WEIGHTS = st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any)


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    """Return a strategy of mixtures of up to five sources in up to four stages."""
    n = draw(st.integers(1, 5))
    sizes = draw(st.lists(st.integers(1, 30), min_size=n, max_size=n))
    starts = sorted(draw(st.sets(st.integers(1, 30), max_size=3)))
    weights = st.lists(st.integers(0, 12), min_size=n, max_size=n).filter(any)
    stages = [Stage(first, whole_weights(draw(weights))) for first in (0, *starts)]
    names = tuple(f"source{i}" for i in range(n))
    batch, seed = draw(st.integers(1, 9)), draw(st.integers(0, 2**63 - 1))
    return Mixture(names, tuple(sizes), tuple(stages), batch, seed)


def read(mixture: Mixture, steps: int) -> tuple[np.ndarray, np.ndarray]:
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
def test_stages_keep_their_shares_and_sources_their_epochs(mixture: Mixture, steps: int) -> None:
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
def test_rows_and_batch_sizes_do_not_change_the_order(
    mixture: Mixture, data: st.DataObject
) -> None:
    step = data.draw(st.integers(0, 10**12))
    whole = mixture.places(step)
    rows = np.array(data.draw(st.lists(st.integers(0, mixture.global_batch - 1), max_size=5)))
    for all_rows, some in zip(whole, mixture.places(step, rows.astype(np.int64))):
        assert np.array_equal(all_rows[rows.astype(np.int64)], some)
    alone = Mixture(mixture.names, mixture.sizes, mixture.stages[:1], 1, mixture.seed)
    batched = Mixture(mixture.names, mixture.sizes, mixture.stages[:1], 6, mixture.seed)
    for one, other in zip(read(alone, 30), read(batched, 5)):
        assert np.array_equal(one, other)


def test_a_step_far_away_takes_no_longer_than_the_first() -> None:
    """It is computed and not counted up to; a place beyond 2^63 is exact."""
    weights = whole_weights([0.70001, 0.2, 0.09999])
    assert sum(weights) == LONGEST_CYCLE
    stages = (Stage(0, weights), Stage(2**53, (1, 1, 1)))
    mixture = Mixture(("a", "b", "c"), (10**9, 7, 1), stages, 4096, seed=1)
    for step in (0, 2**53 - 1, 2**53, 2**60):
        sources, numbers = mixture.places(step)
        assert (numbers[sources == 2] == 0).all()
        assert len({*numbers[sources == 0].tolist()}) == (sources == 0).sum()


def test_an_added_source_leaves_the_order_within_the_others() -> None:
    two = Mixture(("a", "b"), (50, 50), (Stage(0, (1, 1)),), 8, seed=3)
    three = Mixture(("a", "new", "b"), (50, 9, 50), (Stage(0, (1, 1, 1)),), 8, seed=3)
    (of_two, numbers), (of_three, others) = read(two, 10), read(three, 15)
    assert np.array_equal(numbers[of_two == 1], others[of_three == 2])
    assert not np.array_equal(numbers[of_two == 0], numbers[of_two == 1]), "shuffled differently"


def test_negative_steps() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        Mixture(("a",), (3,), (Stage(0, (1,)),), 2, seed=0).places(-1)
