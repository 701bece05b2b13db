"""The forward kernel of attention, whose scores exist one tile at a time, and all launches.

It is the algorithm of FlashAttention-2 (Dao 2023) with what that lacks: dropout masks that depend
on global indices alone, masks of padding, and a learned bias of scores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
from gridformer.utils.tensors import measured


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
    if lse.numel():
        tensors = q, k, v, *_masks(q, k, settings, *masks), out, lse
        strides = (x.stride()[:3] for x in (q, k, v, out))
        first = settings.first_head, settings.first_query
        _launch(forward, q, k, (*tensors, *strides, _sizes(q, k), *first), settings, masks)
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
    hashes = torch.empty_like(lse, dtype=torch.int32)  # of queries, for the later kernels
    inputs = (q, k, v, *_masks(q, k, settings, *masks))

    def launch(kernel: Any, tensors: tuple[Tensor, ...], strided: tuple[Tensor, ...], *more: int):
        strides = (x.stride()[:3] for x in (q, k, v, *strided))
        arguments = (*inputs, *tensors, *strides, _sizes(q, k), *more)
        _launch(kernel, q, k, arguments, settings, masks)

    of_query = lse, delta, hashes
    first = settings.first_head, settings.first_query
    launch(backward_queries, (out, grad, *of_query, grad_q), (out, grad, grad_q), *first)
    places = q if key_documents is None else key_documents.contiguous()
    tensors = places, grad, *of_query, grad_k, grad_v
    launch(backward_keys, tensors, (grad, grad_k, grad_v))
    if grad_bias.numel():
        launch(backward_bias, (grad, *of_query, grad_bias), (grad,))
    return grad_q, grad_k, grad_v, grad_bias


# Queries, keys, warps and stages of tiles of half types; the first are used where nothing is
# measured. On an H100 more than four warps for 64 rows of a product compute what others compute:
# rows are queries, but keys in `backward_keys`.
TILES = {
    "forward": ((128, 64, 8, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 128, 8, 2)),
    "backward_queries": ((64, 64, 4, 2), (128, 64, 8, 2), (128, 128, 8, 2), (64, 32, 4, 3)),
    "backward_keys": ((32, 64, 4, 2), (64, 64, 4, 2), (64, 128, 8, 2), (64, 64, 4, 3)),
    "backward_bias": ((64, 64, 4, 2),),
}
_FASTEST: dict[tuple[Any, ...], dict[str, int]] = {}


def tile_sizes(q: Tensor, name: str) -> list[dict[str, int]]:
    """Returns sizes of a kernel's tiles, and how many threads and buffers a program has.

    The first ones fit into the 99 KiB of shared memory that the smallest supported GPUs have.

    Returns:
        The constants of the kernels: `D`, the width of a tile, at least d; `R` and `C`, its numbers
        of queries and of keys; `num_warps` and `num_stages`, which Triton reads.
    """
    width = max(16, triton.next_power_of_2(q.shape[-1]))
    n_bytes = width * q.element_size()  # of a row
    if n_bytes > 256:
        tiles: tuple[tuple[int, ...], ...] = ((32, 32, 4, 1),)
    elif q.element_size() > 2:
        tiles = ((128 if name == "forward" and n_bytes <= 128 else 64, 64, 8, 2),)
    else:
        tiles = TILES[name]
    return [{"D": width, **dict(zip(("R", "C", "num_warps", "num_stages"), t))} for t in tiles]


def _launch(
    kernel: Any,
    q: Tensor,
    k: Tensor,
    arguments: tuple[Any, ...],
    settings: Settings,
    masks: tuple[Tensor | None, ...],
) -> None:
    """Launches a kernel with the tiles that were the fastest for such tensors."""
    name, constants = kernel.fn.__name__, _constants(settings, *masks)
    (b, n, s, _), (_, m, seen, _) = q.shape, k.shape

    def run(tiles: dict[str, int]) -> None:
        of_queries, of_keys = triton.cdiv(s, tiles["R"]), triton.cdiv(seen, tiles["C"])
        programs = {"backward_keys": b * m * of_keys, "backward_bias": n * of_queries * of_keys}
        kernel[(programs.get(name, b * n * of_queries),)](*arguments, **constants, **tiles)

    run(fastest_tiles(name, q, seen, tuple(constants.values()), run))


def fastest_tiles(
    name: str, q: Tensor, keys: int, constants: tuple[Any, ...], run: Callable[[Any], None]
) -> dict[str, int]:
    """Returns the tiles with which a kernel is the fastest, measured when it is first needed.

    Results differ by rounding between tiles, so the first ones are taken where they must not depend
    on measured times. Ranks may choose differently, because none repeats what another computes.

    Args:
        run: Runs the kernel with some tiles. It may be called often.
    """
    tiles = tile_sizes(q, name)
    fixed = (
        len(tiles) == 1 or q.device.type != "cuda" or torch.are_deterministic_algorithms_enabled()
    )
    if fixed or torch.cuda.is_current_stream_capturing():
        return tiles[0]
    sizes = (triton.next_power_of_2(n) for n in (q.shape[0] * q.shape[1], q.shape[2], keys))
    key = (name, q.device, q.dtype, q.shape[3], *sizes, *constants)
    if key not in _FASTEST:
        times = measured({i: partial(run, one) for i, one in enumerate(tiles)}, q.device)
        _FASTEST[key] = tiles[min(times, key=times.__getitem__, default=0)]
    return _FASTEST[key]


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
