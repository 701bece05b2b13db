"""How much of a conversion is in memory or in one file at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from gridformer.checkpoint.convert.forms import Shape
from gridformer.checkpoint.safetensors_file import Streamed
from gridformer.utils.units import MIB

_PIECE_BYTES = 64 * MIB


def row_slices(shape: Shape, dtype: torch.dtype) -> Iterator[slice]:
    """Yields slices of dimension 0 that hold 64 MiB each, or one row if that is more."""
    row_bytes = dtype.itemsize * torch.Size(shape[1:]).numel()
    step = max(1, _PIECE_BYTES // max(1, row_bytes))
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


def in_files(tensors: Mapping[str, Streamed], n_bytes: int) -> list[list[str]]:
    """Divides tensors, in their order, into files of bounded size.

    A tensor that is larger gets a file of its own.

    Args:
        tensors: The tensors by name.
        n_bytes: The largest size of a file in bytes.

    Returns:
        The names of the tensors of each file.
    """
    files: list[list[str]] = [[]]
    used = 0
    for name, tensor in tensors.items():
        if files[-1] and used + tensor.n_bytes > n_bytes:
            files.append([])
            used = 0
        files[-1].append(name)
        used += tensor.n_bytes
    return files
