"""What a tensor without values has: its place in memory, from which others like it are made."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """The properties of a tensor from which another one like it can be made.

    Attributes:
        n_bytes: The bytes of its storage.
        size: Its shape.
        stride: Its strides.
        offset: Where it begins in its storage.
        dtype: Its dtype.
        device: Its device.
    """

    n_bytes: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(x: Tensor) -> Shape:
        """Returns the shape of a tensor."""
        n_bytes = x.untyped_storage().nbytes()
        offset = int(x.storage_offset())
        return Shape(n_bytes, x.shape, x.stride(), offset, x.dtype, x.device)

    def make(self) -> Tensor:
        """Makes such a tensor, uninitialized."""
        with torch.no_grad():
            n = self.n_bytes // self.dtype.itemsize
            flat = torch.empty(n, dtype=self.dtype, device=self.device)
            return flat.as_strided(self.size, self.stride, self.offset)
