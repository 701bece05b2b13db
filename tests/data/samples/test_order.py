"""Random numbers belong to a place in the global batches; test_windows.py tests the order."""

from collections.abc import Callable

import numpy as np
import pytest

from gridformer.data.samples.mixture import Mixture, Stage
from gridformer.data.samples.order import Order
from gridformer.data.samples.samples import Arrays, ShuffledBatches


class Drawn:
    """Samples that are the random numbers they are given."""

    n_samples = 50

    def sample(self, number: int, draw: np.random.Generator) -> Arrays:
        return {"drawn": draw.integers(2**62, size=4)}


def mixture(n_samples: int, global_batch: int, seed: int) -> Mixture:
    return Mixture(("one",), (n_samples,), (Stage(0, (1,)),), global_batch, seed)


@pytest.mark.parametrize("kind", [Order, mixture])
def test_random_numbers_are_of_a_place(kind: Callable[[int, int, int], Order | Mixture]) -> None:
    order = kind(50, 4, 3)

    def numbers(
        step: int, row: int, purpose: str = "a", order: Order | Mixture = order
    ) -> list[int]:
        batches = ShuffledBatches((Drawn(),), order, purpose)
        (drawn,) = batches.batch(step, slice(row, row + 1))["drawn"].tolist()
        return list(drawn)

    assert numbers(2, 1) == numbers(2, 1)
    places = [numbers(step, row) for step in range(5) for row in range(4)]
    assert len({tuple(place) for place in places}) == 20
    assert numbers(2, 1, "b") != numbers(2, 1)
    assert numbers(2, 1, order=kind(50, 4, 4)) != numbers(2, 1)
    # The place counts samples, so batches of another size use the same numbers in another
    # arrangement.
    assert numbers(1, 2, order=kind(50, 8, 3)) == numbers(2, 2)


def test_global_state_is_left_alone() -> None:
    np.random.seed(0)
    before = np.random.get_state()[1].tolist()  # type: ignore[index]
    ShuffledBatches((Drawn(),), Order(50, 4, 3), "a").batch(0)
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index]
