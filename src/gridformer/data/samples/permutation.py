"""Shuffling without a table: a random order of [0, n) that is computed where it is needed.

A Feistel network over Z_a x Z_b with a*b just above n (Black and Rogaway 2002, "Ciphers with
arbitrary finite domains", method 3): every round adds a hash of one half to the other half, which
can be undone whatever the hash is, so the whole is a bijection. Results that fall in [n, a*b) walk
on along their cycle until they are below n. Only integers, so the order is the same everywhere.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8  # four are enough for a good shuffle of a large n; tiny domains need some more


def permute(positions: NDArray[np.int64], n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Where a shuffle of [0, n), drawn from (seed, epoch), sends each position.

    positions [...] int64 in [0, n); the result [...] int64 in [0, n). O(1) memory besides those.
    """
    assert n >= 1
    assert positions.size == 0 or (positions.min() >= 0 and positions.max() < n)
    keys = _keys(seed, epoch)
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    out = _rounds(positions.astype(np.uint64), a, b, keys)
    # a*b < n + a: hardly any position walks, and each returns, because it started below n.
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
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014); products wrap modulo 2^64."""
    x = x + np.uint64(0x9E3779B97F4A7C15) ^ key
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)
