"""Chooses few of many combinations of settings."""

import itertools
import random
from collections.abc import Sequence
from typing import Any


def pairwise(*dimensions: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations of values, in which every two values of two dimensions occur together.

    There is one for each pair of values of the first two dimensions, which should be the largest.
    Its other values are those that make the most new pairs; chance decides between equal ones.

    Args:
        dimensions: The values of each dimension.
    """
    ranges = [range(len(values)) for values in dimensions]
    others, chance = [*itertools.product(*ranges[2:])], random.Random(0)
    seen: set[tuple[int, int, int, int]] = set()
    found = []
    for first in itertools.product(*ranges[:2]):
        chance.shuffle(others)
        candidates = [(*first, *more) for more in others]
        best = max(candidates, key=lambda one: len(_pairs(one) - seen))
        seen |= _pairs(best)
        found.append(tuple(values[i] for values, i in zip(dimensions, best)))
    n_pairs = sum(len(a) * len(b) for a, b in itertools.combinations(dimensions, 2))
    assert len(seen) == n_pairs, "the first two dimensions are too small"
    return found


def _pairs(places: Sequence[int]) -> set[tuple[int, int, int, int]]:
    both = itertools.combinations(enumerate(places), 2)
    return {(a, i, b, j) for (a, i), (b, j) in both}
