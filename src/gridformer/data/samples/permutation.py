"""Shuffling without a table: a random order of [0, n) whose elements are computed one by one.

A Feistel network over Z_a x Z_b with a*b just above n (Black and Rogaway 2002, "Ciphers with
arbitrary finite domains", method 3). Every round adds a hash of one half to the other half, which
is invertible for any hash, so the network is a bijection. Results in [n, a*b) go through the
network again until they are below n. It uses only integers, so the order is the same everywhere.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8  # four are enough to shuffle a large n well; tiny domains need some more


def permute(positions: NDArray[np.int64], n: int, seed: int | str, epoch: int) -> NDArray[np.int64]:
    """Applies the shuffle of [0, n) for (seed, epoch) to each position.

    Besides argument and result it takes O(1) memory.

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
