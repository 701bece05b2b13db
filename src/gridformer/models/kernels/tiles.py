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

LOG2_E = tl.constexpr(1.4426950408889634)

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
    """`rng.keep` for each pair of the hash of a row and of a column, which are broadcast."""
    return mix(rows ^ columns) > THRESHOLD - 1


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
    a,
    b,
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
    MASKED: tl.constexpr,
):
    """Returns a tile of scores / SCALE; minus infinity where a query does not see a key.

    Args:
        a, b: Queries and keys, or keys and queries for the transposed tile.
        valid: Pointer to the sample's mask of keys [n_columns], if `VALID`.
        bias: Pointer to the head's bias [n_rows, n_columns], if `BIAS`.
        documents: Pointer to where the documents of the sample's queries begin and end among its
            keys [2, n_rows], if `DOCUMENTS`.
        row, column: The queries and the keys of the tile, [R, 1] and [1, C] or the transposes.
        MASKED: Whether a query may not see a key of the tile.
    """
    wide: tl.constexpr = tl.float64 if a.dtype == tl.float64 else tl.float32
    x = product(a, tl.trans(b), tl.zeros([a.shape[0], b.shape[0]], wide), PRECISION)
    seen = column < n_columns
    if BIAS:
        place = row.to(tl.int64) * n_columns + column
        added = tl.load(bias + place, (row < n_rows) & seen, 0.0).to(wide)
        x += added * tl.full([1, 1], 1 / SCALE, wide)
    if MASKED:
        if VALID:
            kept = tl.load(valid + column, seen, 0) != 0
            if WINDOW > 0:  # a padded query, whose window may hold only padding, sees itself
                kept = kept | (column == row + (n_columns - n_rows))
            seen = seen & kept
        if CAUSAL:  # the last query is at the position of the last key
            seen = seen & (column <= row + (n_columns - n_rows))
            if WINDOW > 0:
                seen = seen & (column > row + (n_columns - n_rows - WINDOW))
        if DOCUMENTS:
            begin = tl.load(documents + row, row < n_rows, 0)
            end = tl.load(documents + n_rows + row, row < n_rows, 0)
            seen = seen & (column >= begin) & (column < end)
        x = tl.where(seen, x, float("-inf"))
    return x


@triton.jit
def exponential(x, log, SCALE: tl.constexpr):
    """Returns exp(x * SCALE) / 2^log, with one addition to a product and one power of two."""
    wide: tl.constexpr = tl.float64 if x.dtype == tl.float64 else tl.float32
    return tl.exp2(x * tl.full([1, 1], SCALE * LOG2_E, wide) - log)


@triton.jit
def within(documents, begin, end, low, high, start, size, length, TILE: tl.constexpr):
    """Shrinks ranges to documents of `size` positions: of tiles, and of what all of them see.

    Args:
        documents: Pointer to where the documents of the sample's positions begin and end in the
            range [2, length].
        begin, end: The range of tiles in steps of TILE.
        low, high: The range that needs no mask.
    """
    last = tl.minimum(start + size, length) - 1
    first, first_of_last = tl.load(documents + start), tl.load(documents + last)
    after, after_last = tl.load(documents + length + start), tl.load(documents + length + last)
    begin, end = tl.maximum(begin, first // TILE * TILE), tl.minimum(end, after_last)
    return begin, end, tl.maximum(low, first_of_last), tl.minimum(high, after)


@triton.jit
def whole_tiles(begin, end, low, high, TILE: tl.constexpr):
    """Returns the range of those tiles from `begin` to `end` that lie from `low` to `high`."""
    first = tl.minimum(tl.maximum(begin, tl.cdiv(tl.maximum(low, 0), TILE) * TILE), end)
    return first, tl.maximum(first, tl.minimum(end, tl.maximum(high, 0) // TILE * TILE))


@triton.jit
def row_hashes(counter, sample, head, row, THRESHOLD: tl.constexpr):
    """Returns the hashes of queries of a head, given global indices but that of the sample."""
    hashes = row.to(tl.uint32)
    if THRESHOLD > 0:
        key_low, _, first_sample = load_counter(counter)
        joined = hash_index(hash_index(tl.cast(0, tl.uint32), first_sample + sample), head)
        hashes = hash_row(hash_index(joined, row.to(tl.int64)), key_low)
    return hashes


@triton.jit
def drop(x, of_queries, of_keys, column, n_columns, THRESHOLD: tl.constexpr):
    """Zeroes elements of a tile where dropout drops a probability.

    Args:
        of_queries: The hashes of the tile's queries.
        of_keys: Pointer to the hashes of all keys.
    """
    if THRESHOLD > 0:
        hashes = tl.load(of_keys + column, column < n_columns, 0).to(tl.uint32)
        x = tl.where(kept(of_queries.to(tl.uint32), hashes, THRESHOLD), x, 0.0)
    return x
