"""The random bits of `gridformer.utils.rng` inside Triton kernels, computed in registers.

`rng` computes with 32-bit words held in int64; here they are uint32, whose products wrap at 2^32 as
`rng`'s are masked to it. The results are the same integers (tests/models/kernels/).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_counter(counter):
    """Loads a counter: the two halves of its key and the index of the first sample, all int64."""
    return tl.load(counter), tl.load(counter + 1), tl.load(counter + 2)


@triton.jit
def mix(x):
    """`rng._mix` of uint32 words."""
    x = x ^ (x >> 16)
    x = x * 0x21F0AAAD
    x = x ^ (x >> 15)
    x = x * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def fold(index):
    """`rng._fold` of int64 indices."""
    return index.to(tl.uint32) ^ mix((index >> 32).to(tl.uint32))


@triton.jit
def hash_index(joined, index):
    """Adds one more int64 index to a joined one, as `rng.hash_indices` does; the first joins 0."""
    return mix(joined ^ fold(index)) + 0x9E3779B9


@triton.jit
def hash_row(joined, key_low):
    """The part of `rng.bits` that depends on a row, given as the result of `hash_index`."""
    return mix(joined ^ key_low.to(tl.uint32))


@triton.jit
def hash_column(column, key_high):
    """The part of `rng.bits` that depends on a column, an int64 index."""
    return mix(fold(column) ^ key_high.to(tl.uint32))


@triton.jit
def kept(rows, columns, THRESHOLD: tl.constexpr):
    """`rng.keep` for each pair of the hash of a row [R] and of a column [C], bool [R, C]."""
    return mix(rows[:, None] ^ columns[None, :]).to(tl.int64) >= THRESHOLD
