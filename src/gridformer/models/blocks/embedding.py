"""Embeddings of tokens, positions and segments, and the head that shares the tokens' table.

On a device that holds only a part of the sequence, `part` is (index, number of equal parts).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridformer.models.blocks.cast import ROWS_OF_TABLE
from gridformer.models.blocks.linear import Init, linear, new_parameter


class TokenEmbedding(nn.Module):
    """Maps tokens [b, s] to rows of a [v, h] table, [b, s, h]. `TiedHead` shares the table."""

    cast_parameters, cast_multiple = ("weight",), ROWS_OF_TABLE  # for the head

    def __init__(self, v: int, h: int, std: float) -> None:
        super().__init__()
        self.weight = new_parameter(v, h, init=Init(std=std))

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return F.embedding(tokens_BS, self.weight)


class PositionEmbedding(nn.Module):
    """Returns rows of a [max_seq_len, h] table: `start` to `start + s`, or those of `positions`."""

    def __init__(self, max_seq_len: int, h: int, std: float) -> None:
        super().__init__()
        self.part = (0, 1)
        self.weight = new_parameter(max_seq_len, h, init=Init(std=std))

    def forward(self, s: int, start: int = 0, positions: Tensor | None = None) -> Tensor:
        """Returns this device's part of [s, h] from `start` on, or of [b, s, h] of `positions`."""
        first, size = chunk_bounds(s, self.part)
        if positions is not None:
            return F.embedding(positions[:, first : first + size], self.weight)
        return self.weight[start + first : start + first + size]


class SinusoidalPositions(nn.Module):
    """Sine and cosine of positions at h/2 wavelengths (Vaswani et al. 2017, section 3.5), [s, h].

    Columns alternate between sine and cosine. `columns` is (index, number of blocks) of the block
    of columns on this device, which is [s, h / number of blocks].
    """

    def __init__(self, h: int) -> None:
        super().__init__()
        self.h = h
        self.part, self.columns = (0, 1), (0, 1)

    def forward(self, s: int, start: int, like: Tensor, positions: Tensor | None = None) -> Tensor:
        """Returns [s, h] of positions from `start` on, or [b, s, h] of `positions`, all below s.

        It is this device's part of them, in the dtype of `like`, but at least in float32.
        """
        if positions is not None:
            first, size = chunk_bounds(positions.shape[1], self.part)
            return F.embedding(positions[:, first : first + size], self._waves(0, s, like))
        first, size = chunk_bounds(s, self.part)
        return self._waves(start + first, size, like)

    def _waves(self, first: int, size: int, like: Tensor) -> Tensor:
        left, width = chunk_bounds(self.h, self.columns)
        dtype = torch.promote_types(like.dtype, torch.float32)
        places = torch.arange(first, first + size, device=like.device)
        column = torch.arange(left, left + width, device=like.device)
        rate = torch.exp((column // 2 * 2).double() * (-math.log(10000.0) / self.h))
        angle = places.double().unsqueeze(1) * rate
        return torch.where(column % 2 == 0, angle.sin(), angle.cos()).to(dtype)


class SegmentEmbedding(nn.Module):
    """Maps segments [b, s] to rows of a [2, h] table for sentences A and B, [b, s, h]."""

    def __init__(self, h: int, std: float) -> None:
        super().__init__()
        self.part = (0, 1)
        self.weight = new_parameter(2, h, init=Init(std=std))

    def forward(self, segments_BS: Tensor) -> Tensor:
        first, size = chunk_bounds(segments_BS.shape[1], self.part)
        return F.embedding(segments_BS[:, first : first + size], self.weight)


class TiedHead(nn.Module):
    """Computes logits [b, s, v] = x Tᵀ from the embedding's table T [v, h].

    `biases` is the size of the bias that is added, v in BERT; 0 for none.
    """

    cast_parameters: tuple[str, ...] = ("bias",)
    cast_multiple = ROWS_OF_TABLE

    def __init__(self, biases: int = 0) -> None:
        super().__init__()
        self.bias: nn.Parameter | None = new_parameter(biases, init=Init()) if biases else None

    def prepare(self, table_VH: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the table as `forward(.., prepared=True)` reads it; parallel heads gather it."""
        return table_VH

    def forward(
        self, x_BSH: Tensor, table_VH: Tensor, prepared: bool = False, padded: bool = False
    ) -> Tensor:
        """Computes logits [b, s, v] from x [b, s, h] and the embedding's table, `prepared` or not.

        If `padded`, they may have additional columns, which a loss leaves out.
        """
        return linear(x_BSH, table_VH.t(), self.bias, padded)


class UntiedHead(TiedHead):
    """Computes logits from a table of its own, `Model.table`, which callers pass to it."""

    cast_parameters = ("weight", "bias")

    def __init__(self, v: int, h: int, std: float) -> None:
        super().__init__()
        self.weight = new_parameter(v, h, init=Init(std=std))


def chunk_bounds(whole: int, part: tuple[int, int]) -> tuple[int, int]:
    """Returns the start and the size of `part`, (index, number of parts), of `whole` elements."""
    index, n_parts = part
    return index * (whole // n_parts), whole // n_parts
