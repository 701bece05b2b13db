"""The order of samples: the sample of each row of each step, as a function of (seed, step, row).

It does not depend on the layout or on earlier steps. Every layout and every resumed run therefore
reads the same samples in the same order, and draws the same random numbers for them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gridformer.data.samples.permutation import permute

# Rows of a global batch: a slice of them, or their numbers in any order.
Rows = slice | NDArray[np.int64]


@dataclass(frozen=True)
class Order:
    """Assigns n_samples samples to global batches.

    Steps go through epochs without a gap. Each epoch visits every sample once, in its own order
    drawn from (seed, epoch), or in ascending order if `sequential`.

    Attributes:
        n_samples: The number of samples.
        global_batch: Samples per step.
        seed: The seed.
        sequential: Whether samples come in ascending order.
    """

    n_samples: int
    global_batch: int
    seed: int
    sequential: bool = False

    def indices(self, step: int, rows: Rows | None = None) -> NDArray[np.int64]:
        """Returns the sample numbers [rows] int64 of a step; a batch may span two epochs.

        Only the wanted rows are computed, so a device's time for them depends on its own rows and
        not on the size of the global batch.

        Args:
            step: The number of the step, counted from 0.
            rows: The rows of the global batch; None returns all.

        Raises:
            ValueError: `step` is negative.
        """
        if step < 0:
            raise ValueError(f"{step=} must not be negative")
        # The start is computed with Python's integers: step * global_batch could in theory exceed
        # 2^63, but the position within an epoch cannot.
        epoch, start = divmod(step * self.global_batch, self.n_samples)
        wanted = row_numbers(self.global_batch, rows)
        epochs, positions = np.divmod(start + wanted, self.n_samples)
        if self.sequential:
            return positions
        for ahead in np.unique(epochs).tolist():
            here = epochs == ahead
            positions[here] = permute(positions[here], self.n_samples, self.seed, epoch + ahead)
        return positions

    def generator(self, step: int, row: int, purpose: str) -> np.random.Generator:
        """Returns a generator of random numbers for one row of one step and one purpose.

        Every other row, step or purpose has other numbers.
        """
        place = step * self.global_batch + row
        digest = hashlib.blake2b(f"{self.seed}/{purpose}/{place}".encode(), digest_size=16)
        # The streams of a counter-based generator do not overlap for different keys.
        key = int.from_bytes(digest.digest(), "little")
        return np.random.Generator(np.random.Philox(key=key))


def row_numbers(global_batch: int, rows: Rows | None) -> NDArray[np.int64]:
    """Returns the numbers of `rows` in a global batch, [rows] int64."""
    every = np.arange(global_batch, dtype=np.int64)
    return every if rows is None else every[rows]
