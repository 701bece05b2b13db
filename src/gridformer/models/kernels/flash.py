"""The forward kernel of attention, whose scores exist one tile at a time, and all launches.

It is the algorithm of FlashAttention-2 (Dao 2023) with what that lacks: dropout masks that depend
on global indices alone, masks of padding, and a learned bias of scores.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gridformer.models.kernels.attention import Settings, empty_heads, empty_lse
from gridformer.models.kernels.flash_backward import (
    backward_bias,
    backward_keys,
    backward_queries,
)
from gridformer.models.kernels.library import threshold
from gridformer.models.kernels.tiles import (
    LOG2_E,
    drop,
    exponential,
    hash_column,
    head_of,
    load_counter,
    load_rows,
    product,
    row_hashes,
    scores,
    store_rows,
    whole_tiles,
    within,
)


@triton.jit(do_not_specialize=["first_head", "first_query"])
def forward(
    q,
    k,
    v,
    valid,
    bias,
    documents,
    counter,
    key_hashes,
    out,
    lse,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
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
    """Computes R queries of one head of one sample.

    Args:
        q, out: [b, n, s, d].
        k, v: [b, m, S, d]; n / m heads of queries in a row share one head.
        valid: 0 where a key may not be attended to, uint8 [b, S], contiguous.
        bias: [n, s, S], contiguous.
        documents: Where each query's document begins and ends among the keys, int32 [b, 2, s],
            contiguous.
        counter: What dropout masks depend on, if `THRESHOLD`.
        key_hashes: The hashes of all keys, on which they depend as well, int32 [S].
        lse: For backward, the base-2 logarithm of each query's sum of exponentials [b, n, s].
        first_head, first_query: The global indices on which dropout depends.
        q_strides, k_strides, v_strides, out_strides, sizes: See `tiles`.
        VALID, BIAS, DOCUMENTS: Whether there are these.
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
    row = first_row + tl.arange(0, R)[:, None]
    tile_q = load_rows(q, q_strides, first_row, n_rows, width, R, D)
    wide: tl.constexpr = tl.float64 if tile_q.dtype == tl.float64 else tl.float32
    hashes = row_hashes(counter, sample, first_head + head, first_query + row, THRESHOLD)
    total = tl.zeros([R, D], wide)
    largest, exps = tl.full([R, 1], float("-inf"), wide), tl.zeros([R, 1], wide)
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
    # Tiles in the middle need no masks.
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
            top = tl.max(x, 1, keep_dims=True) * tl.full([1, 1], SCALE * LOG2_E, wide)
            now = tl.maximum(largest, top)
            finite = tl.where(now == float("-inf"), 0.0, now)  # it may not have seen a key yet
            p = exponential(x, finite, SCALE)
            shrink = tl.exp2(largest - finite)
            exps = exps * shrink + tl.sum(p, 1, keep_dims=True)
            p = drop(p, hashes, key_hashes, column, n_columns, THRESHOLD)
            total = product(p.to(tile_v.dtype), tile_v, total * shrink, PRECISION)
            largest = now
    some = exps > 0  # a query that sees no key gets zeros
    gain = tl.full([1, 1], GAIN, wide)
    total = total * (gain / tl.where(some, exps, 1.0))
    store_rows(out, out_strides, total, first_row, n_rows, width, R, D)
    log = tl.where(some, largest + tl.log2(tl.where(some, exps, 1.0)), float("inf"))
    tl.store(lse + pair * n_rows + row, log, row < n_rows)


@triton.jit(do_not_specialize=["first_key"])
def hash_keys(counter, out, first_key, n_columns, COLUMNS: tl.constexpr):
    """Computes the hashes of keys for `drop`, which would cost each tile more than all else."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    _, key_high, _ = load_counter(counter)
    hashes = hash_column(first_key + column.to(tl.int64), key_high)
    tl.store(out + column, hashes.to(tl.int32), column < n_columns)


def launch_attention(
    q: Tensor, k: Tensor, v: Tensor, *masks_and_settings: Any
) -> tuple[Tensor, Tensor]:
    """Computes attention on a GPU; see `attention.attention` for the tensors.

    Returns:
        The result [b, n, s, d], in memory [b, s, n, d], and for the backward pass one number per
        query [b, n, s]: the base-2 logarithm of the sum of its scores' exponentials.
    """
    masks, settings = masks_and_settings[:4], Settings(*masks_and_settings[4:])
    q, k, v = map(_with_whole_rows, (q, k, v))
    out, lse = empty_heads(q), empty_lse(q)
    tiles = tile_sizes(q, forward=True)
    grid = (q.shape[0] * q.shape[1] * triton.cdiv(q.shape[2], tiles["R"]),)
    if lse.numel():
        forward[grid](
            q,
            k,
            v,
            *_masks(q, k, settings, *masks),
            out,
            lse,
            *(x.stride()[:3] for x in (q, k, v, out)),
            _sizes(q, k),
            *(settings.first_head, settings.first_query),
            **_constants(settings, *masks),
            **tiles,
        )
    return out, lse


def launch_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients of `launch_attention`; for the arguments see the operator's schema.

    Returns:
        The gradients of q, k, v and the bias, each of its tensor's shape. That of the bias has no
        elements if it is not wanted or there is no bias.
    """
    valid, bias, documents, counter, key_documents, out, lse, *flat, wants_bias = rest
    masks, settings = (valid, bias, documents, counter), Settings(*flat)
    q, k, v, grad = map(_with_whole_rows, (q, k, v, grad))
    grad_q, grad_k, grad_v = empty_heads(q), empty_heads(k), empty_heads(v)
    grad_bias = q.new_empty(0)
    if wants_bias and bias is not None:
        grad_bias = torch.empty_like(bias, memory_format=torch.contiguous_format)
    if not lse.numel():
        return grad_q, grad_k.zero_(), grad_v.zero_(), grad_bias.zero_()
    delta = torch.empty_like(lse)
    tiles, sizes = tile_sizes(q, forward=False), _sizes(q, k)
    heads, of_keys = q.shape[0] * q.shape[1], k.shape[0] * k.shape[1]
    n_rows, n_columns = triton.cdiv(sizes[2], tiles["R"]), triton.cdiv(sizes[3], tiles["C"])
    constants = {**_constants(settings, *masks), **tiles}
    inputs = (q, k, v, *_masks(q, k, settings, *masks))
    hashes = torch.empty_like(lse, dtype=torch.int32)  # of queries, for the later kernels

    def after(*tensors: Tensor) -> tuple[Any, ...]:
        """Returns the arguments that follow the tensors: strides and sizes."""
        return *(x.stride()[:3] for x in tensors), sizes

    backward_queries[(heads * n_rows,)](
        *(*inputs, out, grad, lse, delta, hashes, grad_q),
        *after(q, k, v, out, grad, grad_q),
        *(settings.first_head, settings.first_query),
        **constants,
    )
    places = q if key_documents is None else key_documents.contiguous()
    backward_keys[(of_keys * n_columns,)](
        *(*inputs, places, grad, lse, delta, hashes, grad_k, grad_v),
        *after(q, k, v, grad, grad_k, grad_v),
        **constants,
    )
    if grad_bias.numel():
        backward_bias[(q.shape[1] * n_rows * n_columns,)](
            *(*inputs, grad, lse, delta, hashes, grad_bias),
            *after(q, k, v, grad),
            **constants,
        )
    return grad_q, grad_k, grad_v, grad_bias


def tile_sizes(q: Tensor, forward: bool) -> dict[str, int]:
    """Returns the sizes of tiles and how many threads and buffers a program has.

    They fit into the 99 KiB of shared memory that the smallest supported GPUs have.

    Returns:
        The constants of the kernels: `D`, the width of a tile, at least d; `R` and `C`, its numbers
        of queries and of keys; `num_warps` and `num_stages`, which Triton reads.
    """
    width = max(16, triton.next_power_of_2(q.shape[-1]))
    n_bytes = width * q.element_size()  # of a row
    if n_bytes > 256:
        return {"D": width, "R": 32, "C": 32, "num_warps": 4, "num_stages": 1}
    rows = 128 if forward and n_bytes <= 128 else 64
    return {"D": width, "R": rows, "C": 64, "num_warps": 8, "num_stages": 2}


def _constants(settings: Settings, *masks: Tensor | None) -> dict[str, Any]:
    valid, bias, documents, _ = masks
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return {
        "SCALE": settings.scale,
        "CAUSAL": settings.causal,
        "WINDOW": settings.window,
        "VALID": valid is not None,
        "BIAS": bias is not None,
        "DOCUMENTS": documents is not None,
        "THRESHOLD": threshold(settings.p),
        "GAIN": 1.0 / (1.0 - settings.p),
        "PRECISION": "tf32" if tf32 else "ieee",
    }


def _with_whole_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _masks(q: Tensor, k: Tensor, settings: Settings, *masks: Tensor | None) -> tuple[Tensor, ...]:
    """Returns the masks as the kernels read them; q takes the place of a missing one."""
    valid, bias, documents, counter = masks
    mask = q if valid is None else valid.contiguous().view(torch.uint8)
    added = q if bias is None else bias.contiguous()
    bounds = q if documents is None else documents.contiguous()
    hashes = q
    if counter is not None and settings.p:
        n = k.shape[2]
        hashes = torch.empty(n, dtype=torch.int32, device=q.device)
        hash_keys[(triton.cdiv(n, 1024),)](counter, hashes, settings.first_key, n, COLUMNS=1024)
    return mask, added, bounds, q if counter is None else counter, hashes


def _sizes(q: Tensor, k: Tensor) -> tuple[int, ...]:
    b, n, s, d = q.shape
    return b, n, s, k.shape[2], d, n // max(1, k.shape[1])
