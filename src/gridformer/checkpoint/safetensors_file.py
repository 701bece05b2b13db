"""Writes and reads safetensors files that hold blocks of tensors.

The offsets of blocks are in the header, where torch.distributed.checkpoint puts them, too.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gridformer.checkpoint.block import TensorBlock
from gridformer.utils.errors import CheckpointError

_INFO = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"
_PIECE = 8 << 20  # bytes
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}


@dataclass(frozen=True)
class Streamed:
    """A tensor that is made piece by piece while it is written.

    Attributes:
        shape: Its shape.
        dtype: Its type.
        pieces: Makes its rows in their order, some at a time.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Callable[[], Iterable[Tensor]]

    @property
    def n_bytes(self) -> int:
        """The size of the tensor in bytes."""
        n_bytes = self.dtype.itemsize
        for n in self.shape:
            n_bytes *= n
        return n_bytes


def write_file(file: BinaryIO, blocks: Mapping[str, TensorBlock]) -> tuple[int, int]:
    """Writes a file and computes its checksum meanwhile, so that it need not be read again.

    One block at a time is copied to host memory.

    Args:
        file: The opened file.
        blocks: Its blocks by the names of their tensors.

    Returns:
        The bytes of the file, and its CRC-32.
    """
    tensors = {name: _in_rows(block.tensor) for name, block in blocks.items()}
    return write_tensors(file, tensors, offsets_info(blocks))


def _in_rows(tensor: Tensor) -> Streamed:
    """Returns a tensor in small pieces, as each piece of a transposed tensor must be copied."""
    if tensor.dim() == 0 or tensor.device.type != "cpu":
        return Streamed(tuple(tensor.shape), tensor.dtype, lambda: (tensor,))
    rows = max(1, _PIECE * len(tensor) // (tensor.numel() * tensor.element_size()))
    return Streamed(tuple(tensor.shape), tensor.dtype, lambda: tensor.split(rows))


def offsets_info(blocks: Mapping[str, TensorBlock]) -> dict[str, str]:
    """Returns the metadata of a file that holds these blocks."""
    offsets = {name: {_OFFSETS: list(block.offset)} for name, block in blocks.items()}
    return {_INFO: json.dumps(offsets)}


def write_streamed(
    path: Path, tensors: Mapping[str, Streamed], metadata: Mapping[str, str]
) -> tuple[int, int]:
    """Creates a file of tensors that are made while it is written; see `write_tensors`.

    Args:
        path: The file to create. It is on the disk, too, when this returns.
        tensors: Its tensors by name.
        metadata: What the header says besides.

    Returns:
        The bytes of the file, and its CRC-32.
    """
    with path.open("wb") as file:
        found = write_tensors(file, tensors, metadata)
        file.flush()
        os.fsync(file.fileno())
    return found


def write_tensors(
    file: BinaryIO, tensors: Mapping[str, Streamed], metadata: Mapping[str, str]
) -> tuple[int, int]:
    """Writes tensors in the format of safetensors, and makes them while it writes.

    Args:
        file: The opened file.
        tensors: Its tensors by name.
        metadata: What the header says besides.

    Returns:
        The bytes of the file, and its CRC-32.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.n_bytes
        header[name] = {
            "dtype": TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    crc, n_bytes = 0, 0
    for piece in (struct.pack("<Q", len(text)), text):
        crc, n_bytes = zlib.crc32(piece, crc), n_bytes + len(piece)
        file.write(piece)
    for name, tensor in tensors.items():
        begin = n_bytes
        for rows in tensor.pieces():
            # It may be a transposed view.
            values = rows.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            crc, n_bytes = zlib.crc32(values, crc), n_bytes + len(values)
            file.write(values)
        assert n_bytes - begin == tensor.n_bytes, f"{name} has another size than announced"
    return n_bytes, crc


@contextmanager
def opened_file(path: Path) -> Iterator[Any]:
    """Opens a safetensors file. The library compares its header with the size of the file.

    Raises:
        CheckpointError: It is none, is damaged, or does not hold what the block asks for.
    """
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise _damaged(path, " ".join(reason.split())) from None


def _damaged(path: Path, reason: str) -> CheckpointError:
    from gridformer.checkpoint.manifest import STEP_FOLDER, damage_remedy

    ours = STEP_FOLDER.fullmatch(path.parent.name)
    return CheckpointError(
        f"{path} is truncated, damaged or no safetensors file ({reason.replace(': ', ', ')}): "
        f"{damage_remedy(path.parent) if ours else 'copy it again'}"
    )


def positions_in(path: Path) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Yields the name, offset and shape of each block of a file; reads only its header.

    Raises:
        CheckpointError: The header is damaged.
    """
    with opened_file(path) as file:
        try:
            offsets = json.loads((file.metadata() or {}).get(_INFO, "{}"))
            for name in file.keys():  # noqa: SIM118 (it is not a mapping)
                shape = tuple(file.get_slice(name).get_shape())
                offset = offsets[name][_OFFSETS] if name in offsets else (0,) * len(shape)
                yield name, tuple(map(index, offset)), shape
        except (ValueError, KeyError, TypeError, RecursionError):
            raise _damaged(path, f"its header has a wrong {_INFO}") from None
