"""Random numbers that are addressed by name and index, so they do not depend on the layout.

Every number is a hash of (key, row, column), where row and column are positions in the *global*
tensor. The integer arithmetic cannot overflow, so results are bitwise equal on every device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cache
from statistics import NormalDist

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MASK = 0xFFFFFFFF
_BETWEEN = "\x1f"  # between the words of a key
_CELLS = 1 << 12  # cells of the normal quantile table; the other 20 bits interpolate


def key(*words: int | str) -> int:
    """Returns a 64-bit key derived from words, for example `key(seed, "layers.0.norm1.weight")`."""
    text = _BETWEEN.join(str(word) for word in words)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def keys(words: Sequence[int | str], names: Iterable[str]) -> NDArray[np.uint32]:
    """Returns the low and the high half of `key(*words, name)` for each name, uint32 [n, 2]."""
    begun = hashlib.blake2b("".join(f"{word}{_BETWEEN}" for word in words).encode(), digest_size=8)

    def digest(name: str) -> bytes:
        state = begun.copy()
        state.update(name.encode())
        return state.digest()

    return np.frombuffer(b"".join(map(digest, names)), "<u4").reshape(-1, 2)


def halves(key: int) -> tuple[int, int]:
    """Splits a 64-bit key into its low and its high half, each in [0, 2^32)."""
    return key & _MASK, key >> 32


def bits(key: int | tuple[Tensor, Tensor], rows: Tensor, cols: Tensor) -> Tensor:
    """Returns 32 random bits for each pair of a row and a column, int64 [..., C] in [0, 2^32).

    Args:
        key: A 64-bit key, or its halves as int64 scalars on the device of the indices.
        rows: [...], int64 indices below 2^62.
        cols: [C], int64 indices below 2^62.
    """
    low, high = halves(key) if isinstance(key, int) else key
    row_hash = _mix(_fold(rows) ^ low)
    col_hash = _mix(_fold(cols) ^ high)
    return _mix_in_place(row_hash.unsqueeze(-1) ^ col_hash)


def hash_indices(first: Tensor, *others: Tensor) -> Tensor:
    """Hashes several broadcastable index tensors into one row index per element, int64 [...]."""
    joined = (_mix(_fold(first)) + 0x9E3779B9) & _MASK
    for index in others:
        joined = (_mix(joined ^ _fold(index)) + 0x9E3779B9) & _MASK
    return joined


def normal(key: int, rows: Tensor, cols: Tensor) -> Tensor:
    """Returns standard normal numbers from `bits`, float64 [..., C].

    This is an inverse transform with a table of 4096 quantiles, whose tails end at 4.2 standard
    deviations. Unlike a logarithm, interpolation rounds the same wherever an element is in memory.
    """
    word = bits(key, rows, cols)
    table = _quantiles().to(rows.device)
    cell = word >> 20
    low = table[cell]
    return low + (table[cell + 1] - low) * ((word & 0xFFFFF).double() / (1 << 20))


def keep(key: int | tuple[Tensor, Tensor], rows: Tensor, cols: Tensor, p: float) -> Tensor:
    """Returns a dropout mask from `bits`, bool [..., C], each True with probability 1-p."""
    return bits(key, rows, cols) >= round(p * (1 << 32))


@cache
def _quantiles() -> Tensor:
    ends = NormalDist().inv_cdf(2.0**-16)
    inner = [NormalDist().inv_cdf(k / _CELLS) for k in range(1, _CELLS)]
    return torch.tensor([ends, *inner, -ends], dtype=torch.float64)


def _fold(index: Tensor) -> Tensor:
    """Folds an index of up to 62 bits into 32 bits, without collisions below 2^32."""
    index = index.to(torch.int64)
    return (index ^ _mix(index >> 32)) & _MASK


def _mix(x: Tensor) -> Tensor:
    """Two-round xorshift-multiply hash of 32-bit words held in int64.

    Multipliers below 2^31 keep every product below 2^63. Constants: C. Wellons, hash-prospector.
    """
    x = x ^ (x >> 16)
    x = (x * 0x21F0AAAD) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x735A2D97) & _MASK
    return x ^ (x >> 15)


def _mix_in_place(x: Tensor) -> Tensor:
    """Computes `_mix` in the memory of x, for tensors whose size matters."""
    x ^= x >> 16
    x *= 0x21F0AAAD
    x &= _MASK
    x ^= x >> 15
    x *= 0x735A2D97
    x &= _MASK
    x ^= x >> 15
    return x
