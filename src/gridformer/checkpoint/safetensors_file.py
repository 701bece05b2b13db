"""Writes and reads safetensors files that hold blocks of tensors.

The offsets of blocks are in the header, where torch.distributed.checkpoint puts them, too.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gridformer.checkpoint.block import Block

_INFO = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"
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
        n_bytes = self.dtype.itemsize
        for n in self.shape:
            n_bytes *= n
        return n_bytes


def write_file(path: Path, blocks: Mapping[str, Block]) -> tuple[int, int]:
    """Writes a file and computes its checksum meanwhile, so that it need not be read again.

    One block at a time is copied to host memory.

    Args:
        path: The file.
        blocks: Its blocks by the names of their tensors.

    Returns:
        The bytes of the file, and its CRC-32.
    """
    tensors = {name: _at_once(block.tensor) for name, block in blocks.items()}
    return write_streamed(path, tensors, offsets_info(blocks))


def _at_once(tensor: Tensor) -> Streamed:
    return Streamed(tuple(tensor.shape), tensor.dtype, lambda: (tensor,))


def offsets_info(blocks: Mapping[str, Block]) -> dict[str, str]:
    """Returns the metadata of a file that holds these blocks."""
    offsets = {name: {_OFFSETS: list(block.offset)} for name, block in blocks.items()}
    return {_INFO: json.dumps(offsets)}


def write_streamed(
    path: Path, tensors: Mapping[str, Streamed], metadata: Mapping[str, str]
) -> tuple[int, int]:
    """Writes a file of tensors that are made while it is written.

    Args:
        path: The file.
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
    with path.open("wb") as file:
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
        file.flush()
        os.fsync(file.fileno())
    return n_bytes, crc


def positions_in(path: Path) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Yields the name, offset and shape of each block of a file; reads only its header."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    info = header.pop("__metadata__", {}).get(_INFO)
    offsets = json.loads(info) if info else {}
    for name, entry in header.items():
        shape = tuple(entry["shape"])
        offset = offsets[name][_OFFSETS] if name in offsets else (0,) * len(shape)
        yield name, tuple(offset), shape
