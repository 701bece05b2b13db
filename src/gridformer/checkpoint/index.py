"""Which file of a checkpoint holds which block, in a form that stays small.

The files of thousands of ranks hold millions of blocks. But many tensors of a rank have the same
position in tensors of the same shape, and many ranks hold the same tensors, so the index has a list
of names once, and for each file the positions of lists. A rank makes its own part without messages.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from gridformer.checkpoint.block import TensorBlock
from gridformer.config import Config
from gridformer.utils.errors import CheckpointError

# The numbers of a list of names, and where blocks of these names begin and how large they are.
Position = tuple[int, tuple[int, ...], tuple[int, ...]]


class Stored(NamedTuple):
    """A block in a file.

    Attributes:
        file: The name of the file.
        name: The name of the tensor.
        offset: Where the block begins in the global tensor.
        size: Its shape.
    """

    file: str
    name: str
    offset: tuple[int, ...]
    size: tuple[int, ...]


class BlockIndex(Config):
    """Where the blocks of a checkpoint are.

    Attributes:
        names: Lists of names of tensors.
        files: For each file, the blocks in it.
    """

    names: list[list[str]]
    files: dict[str, list[Position]]

    def of(self, wanted: Collection[str]) -> Iterator[Stored]:
        """Yields the blocks of some tensors."""
        chosen = [[name for name in names if name in wanted] for names in self.names]
        for file, positions in self.files.items():
            for number, offset, size in positions:
                for name in chosen[number]:
                    yield Stored(file, name, offset, size)


def part_of(file: str, blocks: Mapping[str, TensorBlock]) -> bytes:
    """Returns one file's part of an index, packed; nothing for a rank that writes no file.

    Args:
        file: The name of the file in the folder of the checkpoint.
        blocks: Its blocks, by the name of their global tensor.
    """
    if not blocks:
        return b""
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = defaultdict(list)
    for name, block in blocks.items():
        groups[block.offset, tuple(block.tensor.shape)].append(name)
    found = [(names, offset, size) for (offset, size), names in groups.items()]
    return zlib.compress(json.dumps([file, found]).encode())


def joined_index(parts: Iterable[bytes]) -> BlockIndex:
    """Returns the index of all files, from the parts that `part_of` made."""
    number_of: dict[tuple[str, ...], int] = {}
    files: dict[str, list[Position]] = {}
    for part in parts:
        if not part:
            continue
        file, groups = json.loads(zlib.decompress(part))
        files[file] = [
            (number_of.setdefault(tuple(names), len(number_of)), tuple(offset), tuple(size))
            for names, offset, size in groups
        ]
    names = [[*some] for some in number_of]
    return BlockIndex.model_construct(names=names, files=files)  # it need not be checked


def index_of_files(folder: Path, files: Iterable[str]) -> BlockIndex:
    """Reads the headers of all files, for a checkpoint whose manifest has no index."""
    from gridformer.checkpoint.safetensors_file import positions_in

    number_of: dict[str, int] = {}
    found: dict[str, list[Position]] = {}
    for file in files:
        found[file] = [
            (number_of.setdefault(name, len(number_of)), offset, size)
            for name, offset, size in positions_in(folder / file)
        ]
    return BlockIndex.model_construct(names=[[name] for name in number_of], files=found)


def blocks_for(
    index: BlockIndex, wanted: Mapping[str, TensorBlock], folder: Path
) -> dict[str, list[Stored]]:
    """Returns the stored blocks from which tensors can be filled, by file.

    Args:
        index: The index of a checkpoint.
        wanted: The blocks that are needed.
        folder: The folder, for messages.

    Raises:
        CheckpointError: A tensor is missing or incomplete, or has another global shape.
    """
    held: dict[str, int] = dict.fromkeys(wanted, 0)
    sizes: dict[str, tuple[int, ...]] = {}
    found: dict[str, list[Stored]] = defaultdict(list)
    for stored in index.of(wanted):
        ends = tuple(a + n for a, n in zip(stored.offset, stored.size))
        sizes[stored.name] = tuple(map(max, ends, sizes.get(stored.name, ends)))
        held[stored.name] += _volume(stored.size)
        block = wanted[stored.name]
        if not block.empty and block.overlap(stored.offset, stored.size) is not None:
            found[stored.file].append(stored)
    for name, block in wanted.items():
        if name not in sizes:
            raise CheckpointError(f"{folder} does not contain '{name}': it is of another model")
        if sizes[name] != tuple(block.size):
            raise CheckpointError(
                f"{folder} contains '{name}' with shape {list(sizes[name])}, but this run needs "
                f"{list(block.size)}: it is of another model"
            )
        if held[name] != _volume(block.size):
            raise CheckpointError(f"{folder} contains only a part of '{name}': a file is missing")
    return found


def _volume(size: Iterable[int]) -> int:
    total = 1
    for n in size:
        total *= n
    return total
