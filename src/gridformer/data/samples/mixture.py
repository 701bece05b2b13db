"""The order of samples of several sources: the source and the sample of each row of each step.

Like `Order`, it is a function of (seed, step, row), so every layout and every resumed run reads the
same samples in the same order.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from gridformer.data.samples.order import Rows, in_epochs, row_numbers


@dataclass(frozen=True)
class Stage:
    """Weights that hold from a step on.

    Attributes:
        first_step: The first of these steps, counted from 0.
        weights: One whole number per source, without a common divisor.
    """

    first_step: int
    weights: tuple[int, ...]


@dataclass(frozen=True)
class Cycle:
    """The order of sources, which repeats after `length` samples; every prefix has their shares.

    With weights w_i that add up to 1, the first n samples contain more than n*w_i - 1 and fewer
    than n*w_i + 1 of source i, for every n. Sample j of source i (counted from 0) may therefore be
    neither before slot floor(j / w_i) nor after slot ceil((j + 1) / w_i) - 1. Taking the source
    whose next sample is due first, of those that may come, keeps all these deadlines: it is the
    schedule of periodic tasks that Baruah, Cohen, Plaxton and Varvel (1996, "Proportionate
    progress: a notion of fairness in resource allocation") call P-fair. With whole weights the
    order repeats after their sum, so one table of that length says everything about a run of any
    length.

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
    """Returns the cycle of whole weights >= 0 without a common divisor."""
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


@dataclass(frozen=True)
class Mixture:
    """Assigns the samples of several sources to global batches.

    Each source goes through epochs of its own, without a gap and across stages: it visits every
    sample once before it visits one again. `Cycle` says which source comes when; it begins anew
    with every stage.

    Attributes:
        names: The names of the sources. Each has its own shuffles, drawn from the seed and its
            name, so that a source that is added does not change the others' order.
        sizes: The number of samples of each source.
        stages: At least one stage, in ascending order; the first one begins with step 0.
        global_batch: Samples per step.
        seed: The seed.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    stages: tuple[Stage, ...]
    global_batch: int
    seed: int

    def places(
        self, step: int, rows: Rows | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the sources and the sample numbers in them, each [rows] int64, of a step.

        Args:
            step: The number of the step, counted from 0.
            rows: The rows of the global batch; None returns all.

        Raises:
            ValueError: `step` is negative.
        """
        if step < 0:
            raise ValueError(f"{step=} must not be negative")
        number = max(n for n, stage in enumerate(self.stages) if stage.first_step <= step)
        stage = self.stages[number]
        cycle = cycle_of(stage.weights)
        wanted = row_numbers(self.global_batch, rows)
        # Slots of a stage are counted with Python's integers; those within a cycle are small.
        cycles, start = divmod((step - stage.first_step) * self.global_batch, cycle.length)
        ahead, slots = np.divmod(start + wanted, cycle.length)
        sources = cycle.sources[slots]
        numbers = np.empty_like(sources)
        for i in np.unique(sources).tolist():
            here = sources == i
            first = self._read_before[number][i] + cycles * cycle.counts[i]
            later = ahead[here] * cycle.counts[i] + cycle.ranks[slots[here]]
            seed = f"{self.seed}/{self.names[i]}"
            numbers[here] = in_epochs(first, later, self.sizes[i], seed)
        return sources, numbers

    @cached_property
    def _read_before(self) -> list[list[int]]:
        """For each stage, how many samples of each source are read before it."""
        found = [[0] * len(self.names)]
        for stage, after in zip(self.stages, self.stages[1:]):
            slots = (after.first_step - stage.first_step) * self.global_batch
            new = cycle_of(stage.weights).before(slots)
            found.append([one + more for one, more in zip(found[-1], new)])
        return found
