"""Reads blocks of tensors from safetensors files.

A checkpoint is a set of named global tensors; each file holds blocks of them with their offsets. A
reader may ask for other blocks than were written, so a run can resume under another layout. Each
rank has written one file, and reads the files that hold what it needs. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gridformer.checkpoint.block import Shards, TensorBlock
from gridformer.checkpoint.index import BlockIndex, blocks_for
from gridformer.checkpoint.safetensors_file import opened_file


def read_blocks(shards: Shards, folder: Path, index: BlockIndex) -> None:
    """Fills local tensors in place from the blocks in `folder`, whichever layout wrote them.

    Only files with such blocks are opened.

    Args:
        shards: By global name, this rank's local tensor and its position in the global tensor.
        folder: The folder of a checkpoint.
        index: Where the blocks are.

    Raises:
        CheckpointError: A tensor is missing or incomplete, or has another global shape.
    """
    read_into(
        {name: TensorBlock.of(local, shard) for name, (local, shard) in shards.items()},
        folder,
        index,
    )


def read_into(wanted: Mapping[str, TensorBlock], folder: Path, index: BlockIndex) -> None:
    """Fills blocks in place; see `read_blocks`.

    Args:
        wanted: The blocks to fill, by the name of their global tensor.
        folder: The folder of the checkpoint.
        index: Which file holds which block.

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
