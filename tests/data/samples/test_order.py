"""Random numbers belong to a place in the global batches; test_sampler.py tests the order."""

import numpy as np

from gridformer.data.samples.order import Order


def test_random_numbers_are_of_a_place() -> None:
    order = Order(n_samples=50, global_batch=4, seed=3)

    def numbers(step: int, row: int, purpose: str = "a", order: Order = order) -> list[int]:
        return order.generator(step, row, purpose).integers(2**62, size=4).tolist()

    assert numbers(2, 1) == numbers(2, 1)
    places = [numbers(step, row) for step in range(5) for row in range(4)]
    assert len({tuple(place) for place in places}) == 20
    assert numbers(2, 1, "b") != numbers(2, 1)
    assert numbers(2, 1, order=Order(50, 4, seed=4)) != numbers(2, 1)
    # The place counts samples, so batches of another size use the same numbers in another
    # arrangement.
    assert numbers(1, 2, order=Order(50, 8, seed=3)) == numbers(2, 2)


def test_global_state_is_left_alone() -> None:
    np.random.seed(0)
    before = np.random.get_state()[1].tolist()  # type: ignore[index]
    Order(50, 4, 3).generator(0, 0, "a").random(10)
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index]
