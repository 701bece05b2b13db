"""Tokens, positions and segments as vectors, and the head that shares the tokens' table.

Where a device holds a part of the sequence only, `part` says which, of how many equal ones.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridformer.models.blocks.linear import Init, new_parameter


class TokenEmbedding(nn.Module):
    """Rows of a [v, h] table, one a token. The table also serves the tied head."""

    def __init__(self, v: int, h: int, std: float) -> None:
        super().__init__()
        self.weight = new_parameter(v, h, init=Init(std=std))

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return F.embedding(tokens_BS, self.weight)


class PositionEmbedding(nn.Module):
    """The rows `start` to `start + s` of a [max_seq_len, h] table."""

    def __init__(self, max_seq_len: int, h: int, std: float) -> None:
        super().__init__()
        self.part = (0, 1)
        self.weight = new_parameter(max_seq_len, h, init=Init(std=std))

    def forward(self, s: int, start: int = 0) -> Tensor:
        first, size = chunk_bounds(s, self.part)
        return self.weight[start + first : start + first + size]


class SinusoidalPositions(nn.Module):
    """sin and cos of positions at h/2 wavelengths (Vaswani et al. 2017, section 3.5): [s, h].

    Columns come in pairs, sin and cos. `columns` says which block of them is held here, of how
    many: [s, h/size].
    """

    def __init__(self, h: int) -> None:
        super().__init__()
        self.h = h
        self.part, self.columns = (0, 1), (0, 1)

    def forward(self, s: int, start: int, like: Tensor) -> Tensor:
        """Of `like`'s device, in at least float32."""
        first, size = chunk_bounds(s, self.part)
        left, width = chunk_bounds(self.h, self.columns)
        dtype = torch.promote_types(like.dtype, torch.float32)
        positions = torch.arange(start + first, start + first + size, device=like.device)
        column = torch.arange(left, left + width, device=like.device)
        rate = torch.exp((column // 2 * 2).double() * (-math.log(10000.0) / self.h))
        angle = positions.double().unsqueeze(1) * rate
        return torch.where(column % 2 == 0, angle.sin(), angle.cos()).to(dtype)


class SegmentEmbedding(nn.Module):
    """Rows of a [2, h] table for sentences A and B: segments [b, s] to [b, s, h]."""

    def __init__(self, h: int, std: float) -> None:
        super().__init__()
        self.part = (0, 1)
        self.weight = new_parameter(2, h, init=Init(std=std))

    def forward(self, segments_BS: Tensor) -> Tensor:
        first, size = chunk_bounds(segments_BS.shape[1], self.part)
        return F.embedding(segments_BS[:, first : first + size], self.weight)


class TiedHead(nn.Module):
    """Logits from the embedding's own table: x Tᵀ, plus a bias [v] where there is one (BERT)."""

    def __init__(self, biases: int = 0) -> None:
        super().__init__()
        self.bias: nn.Parameter | None = new_parameter(biases, init=Init()) if biases else None

    def prepare(self, table_VH: Tensor, dtype: torch.dtype) -> Tensor:
        """The table as it may be read many times in `dtype`: nothing to do where it is whole."""
        return table_VH

    def forward(self, x_BSH: Tensor, table_VH: Tensor, prepared: bool = False) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x_BSH.dtype)
        return F.linear(x_BSH, table_VH.to(x_BSH.dtype), bias)


def chunk_bounds(whole: int, part: tuple[int, int]) -> tuple[int, int]:
    """Where part (index, number of parts) of `whole` begins, and its size."""
    index, n_parts = part
    return index * (whole // n_parts), whole // n_parts
