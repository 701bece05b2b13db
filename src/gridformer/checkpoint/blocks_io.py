"""Writes and reads blocks of tensors in safetensors files.

A checkpoint is a set of named global tensors; each file holds blocks of them with their offsets. A
reader may ask for other blocks than were written, so a run can resume under another layout. Each
rank writes one file, and reads the files that hold what it needs. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open

from gridformer import comm
from gridformer.checkpoint.block import Block, Shards, written_here
from gridformer.checkpoint.index import Index, blocks_for, joined, part_of
from gridformer.checkpoint.safetensors_file import write_file
from gridformer.comm import irregular
from gridformer.mesh import Axes, Axis
from gridformer.mesh.groups import objects_group

LABEL = "checkpoint"


@dataclass(frozen=True)
class Written:
    """What all ranks have written.

    Attributes:
        files: For each file, its bytes and its CRC-32.
        index: Where the blocks are; None on other ranks than the first.
    """

    files: dict[str, tuple[int, int]]
    index: Index | None


# The part of an index that this process wrote last, and on the first rank the whole index. Saves of
# one run have the same, so it is collected once.
_last: tuple[bytes, Index | None] | None = None


def write_blocks(shards: Shards, folder: Path, axes: Axes) -> Written:
    """Writes the blocks of all ranks, which call it together, into `folder`.

    A block that several ranks hold (replicas) is written once.

    Args:
        shards: By global name, this rank's local tensor and its position in the global tensor.
        folder: An existing folder on storage that all ranks share.
        axes: The axes of the mesh.
    """
    global _last
    world = replace(axes.world, group=objects_group())
    blocks = written_here(shards, axes)
    part = part_of(_file_of(world.index), blocks)
    is_known = _last is not None and _last[0] == part
    # For each rank: bytes and checksum of its file, bytes of its part, whether that is known.
    told = torch.zeros(world.size, 4, dtype=torch.int64)
    told[world.index, 2:] = torch.tensor([len(part), is_known])
    if blocks:
        found = write_file(folder / _file_of(world.index), blocks)
        told[world.index, :2] = torch.tensor(found)
    told = comm.all_reduce(told, world, label=LABEL)
    if not bool(told[:, 3].all()):
        _last = part, _collected(part, told[:, 2].tolist(), world)
    assert _last is not None
    files = {
        _file_of(rank): (n_bytes, crc)
        for rank, (n_bytes, crc) in enumerate(told[:, :2].tolist())
        if n_bytes
    }
    return Written(files, _last[1])


def read_blocks(shards: Shards, folder: Path, index: Index) -> None:
    """Fills local tensors in place from the blocks in `folder`, whichever layout wrote them.

    Only files with such blocks are opened.

    Args:
        shards: By global name, this rank's local tensor and its position in the global tensor.
        folder: A folder that `write_blocks` filled.
        index: Where the blocks are.

    Raises:
        CheckpointError: A tensor is missing or incomplete, or has another global shape.
    """
    read_into(
        {name: Block.of(local, shard) for name, (local, shard) in shards.items()}, folder, index
    )


def read_into(wanted: Mapping[str, Block], folder: Path, index: Index) -> None:
    """Fills blocks in place; see `read_blocks`."""
    for file, stored in blocks_for(index, wanted, folder).items():
        with safe_open(folder / file, framework="pt") as opened:
            for _, name, offset, size in stored:
                both = wanted[name].overlap(offset, size)
                assert both is not None
                there, here = both
                wanted[name].tensor[here].copy_(opened.get_slice(name)[there])


def _file_of(rank: int) -> str:
    return f"shard-{rank + 1:05d}.safetensors"


def _collected(part: bytes, lengths: list[int], world: Axis) -> Index | None:
    """Joins the parts of all ranks on the first one."""
    mine = torch.frombuffer(bytearray(part), dtype=torch.uint8) if part else torch.empty(0)
    mine = mine.to(torch.uint8)
    if world.size == 1:
        return joined([part])
    parts = irregular.gather(mine, [(length,) for length in lengths], world, 0, LABEL)
    return None if parts is None else joined(x.numpy().tobytes() for x in parts)
