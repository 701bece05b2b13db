"""Random bits in registers, and the steps of attention for one tile of scores, queries by keys.

Names in capitals are known when a kernel is compiled. Tiles of tensors are [rows, D], where D is
the head size rounded up to a power of two; columns beyond the head size hold zeros. Arguments that
belong together are tuples:

    strides   of a tensor [b, n, s, d], for its first three dimensions; the last is contiguous
    sizes     numbers of samples, heads, queries and keys, the head size, and how many heads of
              queries in a row share one head of keys and values
"""

from __future__ import annotations

import triton
import triton.language as tl

# The random bits of `gridformer.utils.rng`, which computes with 32-bit words held in int64. Here
# they are uint32, whose products wrap at 2^32 as `rng` masks them to it: the integers are the same.


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


# --------------------------------------------------------------------------- tiles of attention


@triton.jit
def head_of(x, strides, sample, head):
    """Returns a pointer to one head [s, d] of one sample of x [b, n, s, d]."""
    return x + sample * strides[0] + head * strides[1]


@triton.jit
def load_rows(x, strides, start, n_rows, width, ROWS: tl.constexpr, D: tl.constexpr):
    """Loads rows of one head's x [n_rows, width] from `start` on as a tile [ROWS, D]."""
    row, at = tl.arange(0, ROWS), tl.arange(0, D)
    inside = (start + row < n_rows)[:, None] & (at < width)[None, :]
    x += tl.cast(start, tl.int64) * strides[2]
    return tl.load(x + row[:, None] * strides[2] + at[None, :], inside, 0.0)


@triton.jit
def store_rows(x, strides, tile, start, n_rows, width, ROWS: tl.constexpr, D: tl.constexpr):
    """Stores a tile [ROWS, D] to the rows of one head's x [n_rows, width] from `start` on."""
    row, at = tl.arange(0, ROWS), tl.arange(0, D)
    inside = (start + row < n_rows)[:, None] & (at < width)[None, :]
    x += tl.cast(start, tl.int64) * strides[2]
    tl.store(x + row[:, None] * strides[2] + at[None, :], tile.to(x.dtype.element_ty), inside)


@triton.jit
def product(a, b, total, PRECISION: tl.constexpr):
    """Returns total + a b, computed in the type of `total`."""
    return tl.dot(a, b, total, input_precision=PRECISION, out_dtype=total.dtype)


@triton.jit
def scores(
    q,
    k,
    valid,
    bias,
    documents,
    row,
    column,
    n_rows,
    n_columns,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    VALID: tl.constexpr,
    BIAS: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Returns the scores of a tile [R, C]; minus infinity where a query does not see a key.

    Args:
        valid: Pointer to the sample's mask of keys [n_columns], if `VALID`.
        bias: Pointer to the head's bias [n_rows, n_columns], if `BIAS`.
        documents: Pointer to where the documents of the sample's queries begin and end among its
            keys [2, n_rows], if `DOCUMENTS`.
    """
    wide: tl.constexpr = tl.float64 if q.dtype == tl.float64 else tl.float32
    x = product(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], wide), PRECISION)
    x = x * tl.full([1, 1], SCALE, wide)
    seen = (column < n_columns)[None, :]
    if BIAS:
        place = row[:, None].to(tl.int64) * n_columns + column[None, :]
        x += tl.load(bias + place, (row < n_rows)[:, None] & seen, 0.0).to(x.dtype)
    if VALID:
        kept = (tl.load(valid + column, column < n_columns, 0) != 0)[None, :]
        if WINDOW > 0:  # a padded query, whose window may hold only padding, sees itself
            kept = kept | (column[None, :] == row[:, None] + (n_columns - n_rows))
        seen = seen & kept
    if CAUSAL:  # the last query is at the position of the last key
        seen = seen & (column[None, :] <= row[:, None] + (n_columns - n_rows))
        if WINDOW > 0:
            seen = seen & (column[None, :] > row[:, None] + (n_columns - n_rows - WINDOW))
    if DOCUMENTS:
        begin = tl.load(documents + row, row < n_rows, 0)
        end = tl.load(documents + n_rows + row, row < n_rows, 0)
        seen = seen & (column[None, :] >= begin[:, None]) & (column[None, :] < end[:, None])
    return tl.where(seen, x, float("-inf"))


@triton.jit
def within(documents, begin, end, start, size, length, TILE: tl.constexpr):
    """Shrinks a range of tiles, [begin, end) in steps of TILE, to documents of `size` positions.

    Args:
        documents: Pointer to where the documents of the sample's positions begin and end in the
            range [2, length].
    """
    last = tl.minimum(start + size, length) - 1
    first = tl.load(documents + start) // TILE * TILE
    return tl.maximum(begin, first), tl.minimum(end, tl.load(documents + length + last))


@triton.jit
def dropout_key(counter, THRESHOLD: tl.constexpr):
    """Returns the two halves of a key and the index of the first sample; zeros without dropout."""
    key = (tl.cast(0, tl.int64), tl.cast(0, tl.int64), tl.cast(0, tl.int64))
    if THRESHOLD > 0:
        key = load_counter(counter)
    return key


@triton.jit
def drop(x, sample, head, row, column, key_low, key_high, THRESHOLD: tl.constexpr):
    """Zeroes elements of a tile [R, C] where dropout drops a probability, by global indices."""
    if THRESHOLD > 0:
        joined = hash_index(tl.zeros_like(row).to(tl.uint32), sample)
        rows = hash_row(hash_index(hash_index(joined, head), row.to(tl.int64)), key_low)
        x = tl.where(kept(rows, hash_column(column.to(tl.int64), key_high), THRESHOLD), x, 0.0)
    return x
