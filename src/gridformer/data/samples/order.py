"""The order of samples: the sample of each row of each step, as a function of (seed, step, row).

It does not depend on the layout or on earlier steps. Every layout and every resumed run therefore
reads the same samples in the same order, and draws the same random numbers for them.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Rows of a global batch: a slice of them, or their numbers in any order.
Rows = slice | NDArray[np.int64]
_ROUNDS = 8  # four are enough to shuffle a large n well; tiny domains need some more


@dataclass(frozen=True)
class Order:
    """Assigns n_samples samples to global batches.

    Steps go through epochs without a gap. Each epoch visits every sample once, in its own order
    drawn from (seed, epoch).

    Attributes:
        n_samples: The number of samples.
        global_batch: Samples per step.
        seed: The seed.
    """

    n_samples: int
    global_batch: int
    seed: int

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
        return in_epochs(first, wanted, self.n_samples, self.seed)

    def places(
        self, step: int, rows: Rows | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the sources, of which there is one, and `indices`, as a `Mixture` does."""
        numbers = self.indices(step, rows)
        return np.zeros_like(numbers), numbers


def in_epochs(first: int, ahead: NDArray[np.int64], n: int, seed: int | str) -> NDArray[np.int64]:
    """Returns the sample numbers at some places of an endless sequence of epochs.

    Args:
        first: A place, however far.
        ahead: How far the wanted places are after it, [k] int64 >= 0.
        n: The number of samples, each of which every epoch visits once.
        seed: The seed of the epochs' shuffles.

    Returns:
        int64 [k] in [0, n).
    """
    # The place is a Python integer: it could in theory exceed 2^63, but the position within an
    # epoch cannot.
    epoch, start = divmod(first, n)
    epochs, positions = np.divmod(start + ahead, n)
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
    """Returns the numbers of `rows` in a global batch, [rows] int64; None means all."""
    every = np.arange(global_batch, dtype=np.int64)
    return every if rows is None else every[rows]


def permute(positions: NDArray[np.int64], n: int, seed: int | str, epoch: int) -> NDArray[np.int64]:
    """Applies the shuffle of [0, n) for (seed, epoch) to each position, without a table.

    A Feistel network over Z_a x Z_b with a*b just above n (Black and Rogaway 2002, "Ciphers with
    arbitrary finite domains", method 3). Every round adds a hash of one half to the other half,
    which is invertible for any hash, so the network is a bijection. Results in [n, a*b) go through
    the network again until they are below n. It uses only integers, so the order is the same
    everywhere, and besides argument and result it takes O(1) memory.

    Args:
        positions: int64 [...] in [0, n).
        n: The size of the domain.
        seed: The seed; every number and every text has other shuffles.
        epoch: The epoch; each has its own shuffle.

    Returns:
        int64 [...] in [0, n).
    """
    assert n >= 1
    assert positions.size == 0 or (positions.min() >= 0 and positions.max() < n)
    keys = _keys(seed, epoch)
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    out = _rounds(positions.astype(np.uint64), a, b, keys)
    # a*b < n + a, so few positions repeat, and each ends, because its cycle began below n.
    while (outside := out >= np.uint64(n)).any():
        out[outside] = _rounds(out[outside], a, b, keys)
    return out.astype(np.int64)


def _rounds(x: NDArray[np.uint64], a: int, b: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    size_a, size_b = np.uint64(a), np.uint64(b)
    left, right = x // size_b, x % size_b
    for i, key in enumerate(keys):
        if i % 2 == 0:
            left = (left + _hash(right, key) % size_a) % size_a
        else:
            right = (right + _hash(left, key) % size_b) % size_b
    return left * size_b + right


def _hash(x: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014); products wrap modulo 2^64."""
    x = x + np.uint64(0x9E3779B97F4A7C15) ^ key
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _keys(seed: int | str, epoch: int) -> NDArray[np.uint64]:
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)
