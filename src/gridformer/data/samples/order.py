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
        wanted = row_numbers(self.global_batch, rows)
        first = step * self.global_batch
        return in_epochs(first, wanted, self.n_samples, self.seed, self.sequential)

    def generator(self, step: int, row: int, purpose: str) -> np.random.Generator:
        """Returns a generator of random numbers for one row of one step and one purpose.

        Every other row, step or purpose has other numbers.

        Args:
            step: The step.
            row: The row of its global batch.
            purpose: A name for what the numbers decide.
        """
        return generator_of(self.seed, purpose, step * self.global_batch + row)


def in_epochs(
    first: int, ahead: NDArray[np.int64], n: int, seed: int | str, sequential: bool = False
) -> NDArray[np.int64]:
    """Returns the sample numbers at some places of an endless sequence of epochs.

    Args:
        first: A place, however far.
        ahead: How far the wanted places are after it, [k] int64 >= 0.
        n: The number of samples, each of which every epoch visits once.
        seed: The seed of the epochs' shuffles.
        sequential: Whether samples come in ascending order.

    Returns:
        int64 [k] in [0, n).
    """
    # The place is a Python integer: it could in theory exceed 2^63, but the position within an
    # epoch cannot.
    epoch, start = divmod(first, n)
    epochs, positions = np.divmod(start + ahead, n)
    if sequential:
        return positions
    for later in np.unique(epochs).tolist():
        here = epochs == later
        positions[here] = permute(positions[here], n, seed, epoch + later)
    return positions


def generator_of(seed: int, purpose: str, place: int) -> np.random.Generator:
    """Returns the random numbers of one place of the global order of samples.

    Args:
        seed: The seed.
        purpose: A name for what the numbers decide; other purposes have other numbers.
        place: The number of the sample, counted over all steps.
    """
    digest = hashlib.blake2b(f"{seed}/{purpose}/{place}".encode(), digest_size=16)
    # The streams of a counter-based generator do not overlap for different keys.
    key = int.from_bytes(digest.digest(), "little")
    return np.random.Generator(np.random.Philox(key=key))


def row_numbers(global_batch: int, rows: Rows | None) -> NDArray[np.int64]:
    """Returns the numbers of `rows` in a global batch, [rows] int64.

    Args:
        global_batch: Rows of a global batch.
        rows: The wanted rows; None means all.
    """
    every = np.arange(global_batch, dtype=np.int64)
    return every if rows is None else every[rows]
