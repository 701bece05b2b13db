"""A Triton kernel that multiplies activations by a dropout mask, which exists only in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gridformer.models.kernels.library import threshold
from gridformer.models.kernels.tiles import hash_column, hash_index, hash_row, kept, load_counter

_ELEMENTS = 2048  # of a program's tile: 16 for each of 128 threads


@triton.jit(do_not_specialize=["first_token", "split", "skipped", "first_column"])
def _masked(
    x,
    out,
    counter,
    n_rows,
    n_columns,
    n_tokens,
    first_token,
    split,
    skipped,
    first_column,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    program, n_blocks = tl.program_id(0), tl.cdiv(n_columns, COLUMNS)
    row = (program // n_blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (program % n_blocks).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    key_low, key_high, first_sample = load_counter(counter)
    joined = hash_index(tl.zeros([ROWS], tl.uint32), first_sample + row // n_tokens)
    token = row % n_tokens
    joined = hash_index(joined, first_token + token + tl.where(token >= split, skipped, 0))
    keep = kept(
        hash_row(joined, key_low)[:, None],
        hash_column(first_column + column, key_high)[None, :],
        THRESHOLD,
    )
    place = row[:, None] * n_columns + column[None, :]
    inside = (row < n_rows)[:, None] & (column < n_columns)[None, :]
    values = tl.load(x + place, inside, 0.0)
    # Rounds as PyTorch does: half types are multiplied in float32.
    wide: tl.constexpr = tl.float64 if values.dtype == tl.float64 else tl.float32
    # A product, not a choice, so that NaN and infinity stay visible to the loss scale.
    factor = tl.where(keep, tl.full([1, 1], SCALE, wide), tl.zeros([1, 1], wide))
    tl.store(out + place, (values.to(wide) * factor).to(values.dtype), inside)


def launch_masking(
    x_BSH: Tensor,
    counter: Tensor,
    first_token: int,
    split: int,
    skipped: int,
    first_column: int,
    p: float,
) -> Tensor:
    """Drops elements of x on a GPU as `gridformer.models.blocks.dropout.drop_elements` does."""
    x_BSH = x_BSH.contiguous()
    out = torch.empty_like(x_BSH)
    h = x_BSH.shape[-1]
    n_rows = x_BSH.numel() // max(1, h)
    if not out.numel():
        return out
    columns = min(1024, triton.next_power_of_2(h))
    rows = _ELEMENTS // columns
    grid = (triton.cdiv(n_rows, rows) * triton.cdiv(h, columns),)
    _masked[grid](
        x_BSH,
        out,
        counter,
        n_rows,
        h,
        x_BSH.shape[1],
        first_token,
        split,
        skipped,
        first_column,
        THRESHOLD=threshold(p),
        SCALE=1.0 / (1.0 - p),
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
    )
    return out
