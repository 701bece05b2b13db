"""Which source each sample of a mixture comes from, so that every prefix has the right shares.

With weights w_i that add up to 1, the first n samples contain more than n*w_i - 1 and fewer than
n*w_i + 1 of source i, for every n. Sample j of source i (counted from 0) may therefore be neither
before slot floor(j / w_i) nor after slot ceil((j + 1) / w_i) - 1. Taking the source whose next
sample is due first, of those that may come, keeps all these deadlines: it is the schedule of
periodic tasks that Baruah, Cohen, Plaxton and Varvel (1996, "Proportionate progress: a notion of
fairness in resource allocation") call P-fair. With whole weights the order repeats after their
sum, so one table of that length says everything about a run of any length.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Cycle:
    """The order of sources, which repeats after `length` samples.

    Attributes:
        sources: The source of each slot of the cycle, [length] int64.
        ranks: How many earlier slots of the cycle have the same source, [length] int64.
        counts: How many slots each source has, which are the whole weights.
    """

    sources: NDArray[np.int64]
    ranks: NDArray[np.int64]
    counts: tuple[int, ...]

    @property
    def length(self) -> int:
        """How many samples a cycle has."""
        return len(self.sources)

    def before(self, slot: int) -> list[int]:
        """Returns how many of the slots before `slot`, in any cycle, each source has."""
        cycles, rest = divmod(slot, self.length)
        found = np.bincount(self.sources[:rest], minlength=len(self.counts)).tolist()
        return [cycles * count + more for count, more in zip(self.counts, found)]


@lru_cache(maxsize=64)
def cycle_of(weights: tuple[int, ...]) -> Cycle:
    """Returns the cycle of whole weights >= 0 without a common divisor; see the module."""
    length = sum(weights)
    # One entry per source: the first slot of its next sample, or the slot before which it is due.
    waiting = [(0, i, 0) for i, weight in enumerate(weights) if weight]
    due: list[tuple[int, int, int]] = []
    sources = np.empty(length, dtype=np.int64)
    for slot in range(length):
        while waiting and waiting[0][0] <= slot:
            _, i, number = heapq.heappop(waiting)
            heapq.heappush(due, (-(-(number + 1) * length // weights[i]), i, number))
        _, i, number = heapq.heappop(due)
        sources[slot] = i
        heapq.heappush(waiting, ((number + 1) * length // weights[i], i, number + 1))
    ranks = np.empty(length, dtype=np.int64)
    for i, weight in enumerate(weights):
        ranks[sources == i] = np.arange(weight)
    return Cycle(sources, ranks, weights)
