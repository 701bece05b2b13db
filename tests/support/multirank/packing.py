"""Pickles values for other processes; tensors on the CPU become their bytes, without strides.

torch's own way writes an archive for each tensor: for the weights of a small model it took longer
than a training step.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor


def packed(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, x: Any) -> Any:
        if type(x) is not Tensor or x.device.type != "cpu" or x.requires_grad:
            return NotImplemented
        data = x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (data, x.dtype, tuple(x.shape))


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
