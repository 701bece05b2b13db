"""The forward kernel of attention: scores and probabilities exist one tile at a time.

It is the algorithm of FlashAttention-2 (Dao 2023) with what that lacks: dropout masks that depend
on global indices alone, masks of padding, and a learned bias of scores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gridformer.models.kernels.tiles import (
    drop,
    dropout_key,
    head_of,
    load_rows,
    product,
    scores,
    store_rows,
    within,
)


@triton.jit(do_not_specialize=["first_head"])
def forward(
    q,
    k,
    v,
    valid,
    bias,
    documents,
    counter,
    out,
    lse,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    sizes,
    first_head,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    VALID: tl.constexpr,
    BIAS: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    GAIN: tl.constexpr,
    PRECISION: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Computes R queries of one head of one sample.

    Args:
        q, out: [b, n, s, d].
        k, v: [b, m, S, d]; n / m heads of queries in a row share one head.
        valid: 0 where a key may not be attended to, uint8 [b, S], contiguous.
        bias: [n, s, S], contiguous.
        documents: Where each query's document begins and ends among the keys, int32 [b, 2, s],
            contiguous.
        counter: What dropout masks depend on, if `THRESHOLD`; see `dropout.masked`.
        lse: For backward, the logarithm of each query's sum of exponentials [b, n, s].
        q_strides, k_strides, v_strides, out_strides, sizes: See `tiles`.
        first_head: The global index of the first head.
        SCALE: A factor of the scores.
        CAUSAL: Whether queries see only the past.
        VALID, BIAS, DOCUMENTS: Whether there are these.
        WINDOW: How many keys a query sees at most if `CAUSAL`; 0 means all of them.
        THRESHOLD: The value that random bits must reach for a probability to be kept.
        GAIN: 1 / (1 - p), with the probability p of dropping one.
        PRECISION: How float32 is multiplied, ieee or tf32.
    """
    n_heads, n_rows, n_columns, width = sizes[1], sizes[2], sizes[3], sizes[4]
    n_blocks = tl.cdiv(n_rows, R)
    pair = (tl.program_id(0) // n_blocks).to(tl.int64)
    first_row = (tl.program_id(0) % n_blocks) * R
    sample, head = pair // n_heads, pair % n_heads
    q, out = head_of(q, q_strides, sample, head), head_of(out, out_strides, sample, head)
    of_keys = head // sizes[5]
    k, v = head_of(k, k_strides, sample, of_keys), head_of(v, v_strides, sample, of_keys)
    valid, bias = valid + sample * n_columns, bias + head * n_rows * n_columns
    documents += sample * 2 * n_rows
    row = first_row + tl.arange(0, R)
    tile_q = load_rows(q, q_strides, first_row, n_rows, width, R, D)
    wide: tl.constexpr = tl.float64 if tile_q.dtype == tl.float64 else tl.float32
    key_low, key_high, first_sample = dropout_key(counter, THRESHOLD)
    total = tl.zeros([R, D], wide)
    largest, exps = tl.full([R], float("-inf"), wide), tl.zeros([R], wide)
    begin, end = 0, n_columns
    if CAUSAL:
        end = tl.minimum(end, first_row + R + n_columns - n_rows)
        if WINDOW > 0:  # the tile of the first key that one of these queries sees
            begin = tl.maximum(0, first_row + n_columns - n_rows - WINDOW + 1) // C * C
    if DOCUMENTS:
        begin, end = within(documents, begin, end, first_row, R, n_rows, C)
    for start in range(begin, end, C):
        column = start + tl.arange(0, C)
        tile_k = load_rows(k, k_strides, start, n_columns, width, C, D)
        tile_v = load_rows(v, v_strides, start, n_columns, width, C, D)
        x = scores(
            tile_q, tile_k, valid, bias, documents, row, column, n_rows, n_columns,
            SCALE, CAUSAL, WINDOW, VALID, BIAS, DOCUMENTS, PRECISION,
        )  # fmt: skip
        now = tl.maximum(largest, tl.max(x, 1))
        finite = tl.where(now == float("-inf"), 0.0, now)  # a query may not have seen a key yet
        p = tl.exp(x - finite[:, None])
        shrink = tl.exp(largest - finite)
        exps = exps * shrink + tl.sum(p, 1)
        p = drop(
            p, first_sample + sample, first_head + head, row, column, key_low, key_high, THRESHOLD
        )
        total = product(p.to(tile_v.dtype), tile_v, total * shrink[:, None], PRECISION)
        largest = now
    some = exps > 0  # a query that sees no key gets zeros
    gain = tl.full([1], GAIN, wide)
    total = total * (gain / tl.where(some, exps, 1.0))[:, None]
    store_rows(out, out_strides, total, first_row, n_rows, width, R, D)
    log = tl.where(some, largest + tl.log(tl.where(some, exps, 1.0)), float("inf"))
    tl.store(lse + pair * n_rows + row, log, row < n_rows)
