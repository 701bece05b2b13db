"""The backward kernels of attention, which compute each tile of scores and masks again.

Each gradient is summed by the program that stores it, in one order, so that results are the same
whenever they are computed. Arguments are those of `flash.forward`; `grad` is the gradient of `out`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gridformer.models.kernels.tiles import (
    drop,
    exponential,
    head_of,
    load_rows,
    product,
    row_hashes,
    scores,
    store_rows,
    whole_tiles,
    within,
)


@triton.jit(do_not_specialize=["first_head", "first_query"])
def backward_queries(
    q,
    k,
    v,
    valid,
    bias,
    documents,
    counter,
    key_hashes,
    out,
    grad,
    lse,
    delta,
    hashes,
    grad_q,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    grad_strides,
    grad_q_strides,
    sizes,
    first_head,
    first_query,
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
    """Computes the gradient of R queries, and what the other kernels read of each query.

    That is `delta` [b, n, s], the sum of out * grad over d, and the hashes of dropout [b, n, s].
    """
    n_heads, n_rows, n_columns, width = sizes[1], sizes[2], sizes[3], sizes[4]
    n_blocks = tl.cdiv(n_rows, R)
    pair = (tl.program_id(0) // n_blocks).to(tl.int64)
    first_row = (tl.program_id(0) % n_blocks) * R
    sample, head = pair // n_heads, pair % n_heads
    q, out = head_of(q, q_strides, sample, head), head_of(out, out_strides, sample, head)
    of_keys = head // sizes[5]
    k, v = head_of(k, k_strides, sample, of_keys), head_of(v, v_strides, sample, of_keys)
    grad = head_of(grad, grad_strides, sample, head)
    valid, bias = valid + sample * n_columns, bias + head * n_rows * n_columns
    documents += sample * 2 * n_rows
    row = first_row + tl.arange(0, R)[:, None]
    tile_q = load_rows(q, q_strides, first_row, n_rows, width, R, D)
    tile_out = load_rows(out, out_strides, first_row, n_rows, width, R, D)
    tile_grad = load_rows(grad, grad_strides, first_row, n_rows, width, R, D)
    wide: tl.constexpr = tl.float64 if tile_q.dtype == tl.float64 else tl.float32
    row_hash = row_hashes(counter, sample, first_head + head, first_query + row, THRESHOLD)
    row_delta = tl.sum(tile_out.to(wide) * tile_grad.to(wide), 1, keep_dims=True)
    place = pair * n_rows + row
    tl.store(delta + place, row_delta, row < n_rows)
    if THRESHOLD > 0:
        tl.store(hashes + place, row_hash.to(tl.int32), row < n_rows)
    log = tl.load(lse + place, row < n_rows, float("inf"))
    total = tl.zeros([R, D], wide)
    begin, end, low, high = 0, n_columns, 0, n_columns
    if CAUSAL:
        position = first_row + n_columns - n_rows  # of the first query
        end, high = tl.minimum(end, position + R), position + 1
        if WINDOW > 0:  # from the tile of the first key that one of these queries sees
            begin, low = tl.maximum(0, position - WINDOW + 1) // C * C, position + R - WINDOW
    if DOCUMENTS:
        begin, end, low, high = within(documents, begin, end, low, high, first_row, R, n_rows, C)
    if VALID:
        high = 0
    whole, after = whole_tiles(begin, end, low, high, C)
    FIRST: tl.constexpr = 2 if VALID else (0 if WINDOW > 0 or DOCUMENTS else 1)
    for part in tl.static_range(FIRST, 3):
        from_key = begin if part == 0 or FIRST == 2 else (whole if part == 1 else after)
        to_key = whole if part == 0 else (after if part == 1 else end)
        for start in range(from_key, to_key, C):
            column = start + tl.arange(0, C)[None, :]
            tile_k = load_rows(k, k_strides, start, n_columns, width, C, D)
            tile_v = load_rows(v, v_strides, start, n_columns, width, C, D)
            x = scores(
                tile_q, tile_k, valid, bias, documents, row, column, n_rows, n_columns,
                SCALE, CAUSAL, WINDOW, VALID, BIAS, DOCUMENTS, PRECISION, part != 1,
            )  # fmt: skip
            grad_p = product(tile_grad, tl.trans(tile_v), tl.zeros([R, C], wide), PRECISION)
            grad_p = drop(grad_p, row_hash, key_hashes, column, n_columns, THRESHOLD)
            grad_x = grad_p * tl.full([1, 1], GAIN, wide) - row_delta
            grad_x = exponential(x, log, SCALE) * grad_x
            total = product(grad_x.to(tile_k.dtype), tile_k, total, PRECISION)
    total = total * tl.full([1, 1], SCALE, wide)
    grad_q = head_of(grad_q, grad_q_strides, sample, head)
    store_rows(grad_q, grad_q_strides, total, first_row, n_rows, width, R, D)


@triton.jit
def backward_keys(
    q,
    k,
    v,
    valid,
    bias,
    documents,
    counter,
    key_hashes,
    key_documents,
    grad,
    lse,
    delta,
    hashes,
    grad_k,
    grad_v,
    q_strides,
    k_strides,
    v_strides,
    grad_strides,
    grad_k_strides,
    grad_v_strides,
    sizes,
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
    """Computes the gradients of C keys and their values. It runs after `backward_queries`.

    `key_documents` is where each key's document begins and ends among the queries, int32 [b, 2, S],
    contiguous.
    """
    n_heads, n_rows, n_columns, width, n_sharing = sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]
    n_blocks = tl.cdiv(n_columns, C)
    pair = (tl.program_id(0) // n_blocks).to(tl.int64)
    start = (tl.program_id(0) % n_blocks) * C
    sample, of_keys = pair // (n_heads // n_sharing), pair % (n_heads // n_sharing)
    k, v = head_of(k, k_strides, sample, of_keys), head_of(v, v_strides, sample, of_keys)
    valid += sample * n_columns
    documents += sample * 2 * n_rows
    key_documents += sample * 2 * n_columns
    column = start + tl.arange(0, C)[:, None]  # tiles are transposed: keys by queries
    tile_k = load_rows(k, k_strides, start, n_columns, width, C, D)
    tile_v = load_rows(v, v_strides, start, n_columns, width, C, D)
    wide: tl.constexpr = tl.float64 if tile_k.dtype == tl.float64 else tl.float32
    total_k, total_v = tl.zeros([C, D], wide), tl.zeros([C, D], wide)
    begin, end, low, high = 0, n_rows, 0, n_rows + R  # queries behind the last one add nothing
    if CAUSAL:
        earliest = start - (n_columns - n_rows)  # the query at the position of the first key
        # From the tile of the first query that sees one of these keys.
        begin, low = tl.maximum(0, earliest) // R * R, earliest + C - 1
        if WINDOW > 0:
            end, high = tl.minimum(end, earliest + C - 1 + WINDOW), earliest + WINDOW
    if DOCUMENTS:
        begin, end, low, high = within(key_documents, begin, end, low, high, start, C, n_columns, R)
    low = tl.where(start + C > n_columns, n_rows, low)
    if VALID:
        low = n_rows
    whole, after = whole_tiles(begin, end, low, high, R)
    PARTS: tl.constexpr = 1 if VALID else (3 if WINDOW > 0 or DOCUMENTS else 2)
    for index in range(0, n_sharing):
        head = of_keys * n_sharing + index
        this_q = head_of(q, q_strides, sample, head)
        this_grad = head_of(grad, grad_strides, sample, head)
        this_bias = bias + head * n_rows * n_columns
        first_place = (sample * n_heads + head) * n_rows
        for part in tl.static_range(0, PARTS):
            from_query = begin if part == 0 else (whole if part == 1 else after)
            to_query = (whole if part == 0 else (after if part == 1 else end)) if PARTS > 1 else end
            for first_row in range(from_query, to_query, R):
                row = first_row + tl.arange(0, R)[None, :]
                tile_q = load_rows(this_q, q_strides, first_row, n_rows, width, R, D)
                tile_grad = load_rows(this_grad, grad_strides, first_row, n_rows, width, R, D)
                log = tl.load(lse + first_place + row, row < n_rows, float("inf"))
                row_delta = tl.load(delta + first_place + row, row < n_rows, 0.0)
                x = scores(
                    tile_k, tile_q, valid, this_bias, documents, row, column, n_rows, n_columns,
                    SCALE, CAUSAL, WINDOW, VALID, BIAS, DOCUMENTS, PRECISION, part != 1,
                )  # fmt: skip
                p = exponential(x, log, SCALE)
                factor = tl.full([C, R], GAIN, wide)
                if THRESHOLD > 0:
                    row_hash = tl.load(hashes + first_place + row, row < n_rows, 0)
                    factor = drop(factor, row_hash, key_hashes, column, n_columns, THRESHOLD)
                total_v = product((p * factor).to(tile_grad.dtype), tile_grad, total_v, PRECISION)
                grad_p = product(tile_v, tl.trans(tile_grad), tl.zeros([C, R], wide), PRECISION)
                grad_x = (p * (grad_p * factor - row_delta)).to(tile_q.dtype)
                total_k = product(grad_x, tile_q, total_k, PRECISION)
    total_k = total_k * tl.full([1, 1], SCALE, wide)
    grad_k = head_of(grad_k, grad_k_strides, sample, of_keys)
    grad_v = head_of(grad_v, grad_v_strides, sample, of_keys)
    store_rows(grad_k, grad_k_strides, total_k, start, n_columns, width, C, D)
    store_rows(grad_v, grad_v_strides, total_v, start, n_columns, width, C, D)


@triton.jit
def backward_bias(
    q,
    k,
    v,
    valid,
    bias,
    documents,
    counter,
    key_hashes,
    grad,
    lse,
    delta,
    hashes,
    grad_bias,
    q_strides,
    k_strides,
    v_strides,
    grad_strides,
    sizes,
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
    """Computes a tile of one head's gradient of the bias [n, s, S], a sum over samples.

    It runs after `backward_queries`.
    """
    n_samples, n_heads = sizes[0], sizes[1]
    n_rows, n_columns, width = sizes[2], sizes[3], sizes[4]
    n_blocks = tl.cdiv(n_columns, C)
    n_tiles = tl.cdiv(n_rows, R) * n_blocks
    head = (tl.program_id(0) // n_tiles).to(tl.int64)
    tile = tl.program_id(0) % n_tiles
    first_row, start = tile // n_blocks * R, tile % n_blocks * C
    row, column = first_row + tl.arange(0, R)[:, None], start + tl.arange(0, C)[None, :]
    bias, grad_bias = bias + head * n_rows * n_columns, grad_bias + head * n_rows * n_columns
    wide: tl.constexpr = tl.float64 if q.dtype.element_ty == tl.float64 else tl.float32
    total = tl.zeros([R, C], wide)
    end = n_samples
    if CAUSAL:  # no sample adds to a tile in the future
        end = tl.where(start <= first_row + R - 1 + n_columns - n_rows, n_samples, 0)
    for index in range(0, end):
        sample = tl.cast(index, tl.int64)
        this_q = head_of(q, q_strides, sample, head)
        this_k = head_of(k, k_strides, sample, head // sizes[5])
        this_v = head_of(v, v_strides, sample, head // sizes[5])
        this_grad = head_of(grad, grad_strides, sample, head)
        tile_q = load_rows(this_q, q_strides, first_row, n_rows, width, R, D)
        tile_k = load_rows(this_k, k_strides, start, n_columns, width, C, D)
        tile_v = load_rows(this_v, v_strides, start, n_columns, width, C, D)
        tile_grad = load_rows(this_grad, grad_strides, first_row, n_rows, width, R, D)
        place = (sample * n_heads + head) * n_rows + row
        log = tl.load(lse + place, row < n_rows, float("inf"))
        row_delta = tl.load(delta + place, row < n_rows, 0.0)
        x = scores(
            tile_q, tile_k, valid + sample * n_columns, bias, documents + sample * 2 * n_rows,
            row, column, n_rows, n_columns,
            SCALE, CAUSAL, WINDOW, VALID, BIAS, DOCUMENTS, PRECISION, True,
        )  # fmt: skip
        grad_p = product(tile_grad, tl.trans(tile_v), tl.zeros([R, C], wide), PRECISION)
        if THRESHOLD > 0:
            row_hash = tl.load(hashes + place, row < n_rows, 0)
            grad_p = drop(grad_p, row_hash, key_hashes, column, n_columns, THRESHOLD)
        grad_p = grad_p * tl.full([1, 1], GAIN, wide)
        total += exponential(x, log, SCALE) * (grad_p - row_delta)
    place = row.to(tl.int64) * n_columns + column
    inside = (row < n_rows) & (column < n_columns)
    tl.store(grad_bias + place, total.to(grad_bias.dtype.element_ty), inside)
