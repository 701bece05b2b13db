"""Writes and reads safetensors files that hold blocks of tensors. Nothing is pickled.

The offsets of blocks are in the header, where torch.distributed.checkpoint puts them, too.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import index as as_index
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gridformer.checkpoint.blocks import BlockIndex, TensorBlock, blocks_for
from gridformer.utils.errors import CheckpointError
from gridformer.utils.units import MIB

_INFO, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
_PIECE_BYTES = 8 * MIB  # of what is copied at a time
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}
# By their names in safetensors files.
DTYPES = {name: dtype for dtype, name in TYPES.items()}


@dataclass(frozen=True)
class Streamed:
    """A tensor that is made when it is written."""

    shape: tuple[int, ...]
    dtype: torch.dtype  # in the file
    make: Callable[[], Tensor]  # of another type perhaps, a view of a mapped file, or on a GPU

    @property
    def n_bytes(self) -> int:
        """The size of the tensor in the file."""
        return self.dtype.itemsize * math.prod(self.shape)

    def pieces(self) -> Iterator[Tensor]:
        """Yields its rows, some at a time, as only they are read, copied and converted."""
        whole = self.make()
        if whole.dim() == 0 or whole.device.type != "cpu":
            yield whole.cpu().to(self.dtype).contiguous()
            return
        n_bytes = max(1, whole.numel() * whole.element_size())
        for rows in whole.split(max(1, _PIECE_BYTES * len(whole) // n_bytes)):
            yield rows.to(self.dtype).contiguous()  # it may be a transposed view


def write_file(file: BinaryIO, blocks: Mapping[str, TensorBlock]) -> tuple[int, int]:
    """Writes blocks by the names of their tensors, and returns what `write_tensors` does."""
    tensors = {name: block.tensor for name, block in blocks.items()}
    streamed = {name: Streamed(tuple(x.shape), x.dtype, x.detach) for name, x in tensors.items()}
    return write_tensors(file, streamed, offsets_info(blocks))


def offsets_info(blocks: Mapping[str, TensorBlock]) -> dict[str, str]:
    """Returns the metadata of a file that holds these blocks."""
    offsets = {name: {_OFFSETS: list(block.offset)} for name, block in blocks.items()}
    return {_INFO: json.dumps(offsets)}


def write_tensors(
    file: BinaryIO, tensors: Mapping[str, Streamed], metadata: Mapping[str, str]
) -> tuple[int, int]:
    """Writes tensors by name, and what the header says besides.

    Returns:
        The bytes of the file and its CRC-32, so that it need not be read again.
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
    for part in (struct.pack("<Q", len(text)), text):
        crc, n_bytes = zlib.crc32(part, crc), n_bytes + len(part)
        file.write(part)
    for name, tensor in tensors.items():
        begin = n_bytes
        for rows in tensor.pieces():
            values = rows.view(-1).view(torch.uint8).numpy().data
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
                yield name, tuple(map(as_index, offset)), shape
        except (ValueError, KeyError, TypeError, RecursionError):
            raise _damaged(path, f"its header has a wrong {_INFO}") from None


def read_blocks(wanted: Mapping[str, TensorBlock], folder: Path, index: BlockIndex) -> None:
    """Fills blocks, by the name of their global tensor, from the few files that hold parts of them.

    Raises:
        CheckpointError: A tensor is missing or incomplete, or has another global shape.
    """
    for file, stored in blocks_for(index, wanted, folder).items():
        with opened_file(folder / file) as opened:
            for _, name, offset, size in stored:
                both = wanted[name].overlap(offset, size)
                assert both is not None
                there, here = both
                wanted[name].tensor[here].copy_(opened.get_slice(name)[there])
