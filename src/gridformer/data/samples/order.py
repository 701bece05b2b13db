"""Which sample lies at which place of which step: a pure function of (seed, step, row).

Nothing here knows the layout or what ran before, so every layout, and every resumed run, reads
the same samples in the same order, and draws the same numbers for them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gridformer.data.samples.permutation import permute


@dataclass(frozen=True)
class Order:
    """Deals n_samples samples out in global batches.

    Steps walk through epochs without a break: each epoch visits every sample once, in an order of
    its own drawn from (seed, epoch), or as they lie where `sequential` is set.
    """

    n_samples: int
    global_batch: int
    seed: int
    sequential: bool = False

    def indices(self, step: int) -> NDArray[np.int64]:
        """Sample numbers [global_batch] of a step >= 0; a batch may straddle epochs."""
        if step < 0:
            raise ValueError(f"{step=} must not be negative")
        # Python's integers for the start: step * global_batch may pass 2^63 only in theory, but
        # the position within an epoch never does.
        epoch, start = divmod(step * self.global_batch, self.n_samples)
        positions = start + np.arange(self.global_batch, dtype=np.int64)
        epochs, positions = np.divmod(positions, self.n_samples)
        if self.sequential:
            return positions
        for ahead in range(int(epochs[-1]) + 1):
            here = epochs == ahead
            positions[here] = permute(positions[here], self.n_samples, self.seed, epoch + ahead)
        return positions

    def generator(self, step: int, row: int, purpose: str) -> np.random.Generator:
        """Random numbers of one place of one step, for one purpose; other places have others."""
        place = step * self.global_batch + row
        digest = hashlib.blake2b(f"{self.seed}/{purpose}/{place}".encode(), digest_size=16)
        # A key of a counter-based generator: streams of different keys do not meet.
        key = int.from_bytes(digest.digest(), "little")
        return np.random.Generator(np.random.Philox(key=key))
