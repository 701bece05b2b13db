"""Writes and reads safetensors files that hold blocks of tensors.

The offsets of blocks are in the header, where torch.distributed.checkpoint puts them, too.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from gridformer.checkpoint.block import Block

_INFO = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}


def write_file(path: Path, blocks: Mapping[str, Block]) -> tuple[int, int]:
    """Writes a file and computes its checksum meanwhile, so that it need not be read again.

    One block at a time is copied to host memory.

    Args:
        path: The file.
        blocks: Its blocks by the names of their tensors.

    Returns:
        The bytes of the file, and its CRC-32.
    """
    offsets = {name: {_OFFSETS: list(block.offset)} for name, block in blocks.items()}
    header: dict[str, object] = {"__metadata__": {_INFO: json.dumps(offsets)}}
    end = 0
    for name, block in blocks.items():
        begin, end = end, end + block.tensor.numel() * block.tensor.element_size()
        header[name] = {
            "dtype": _TYPES[block.tensor.dtype],
            "shape": list(block.tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    crc, n_bytes = 0, 0
    with path.open("wb") as file:
        for piece in (struct.pack("<Q", len(text)), text):
            crc, n_bytes = zlib.crc32(piece, crc), n_bytes + len(piece)
            file.write(piece)
        for block in blocks.values():
            # A block may be a transposed view.
            values = block.tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            crc, n_bytes = zlib.crc32(values, crc), n_bytes + len(values)
            file.write(values)
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
