"""Blocks of global tensors, which are what a checkpoint consists of, and the index of its files.

The files of thousands of ranks hold millions of blocks. But many tensors of a rank have the same
position in tensors of the same shape, and many ranks hold the same tensors, so the index has a list
of names once, and for each file the positions of lists. A rank makes its own part without messages.
"""

from __future__ import annotations

import contextlib
import json
import math
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gridformer.config import Config
from gridformer.mesh import Axes
from gridformer.parallel.sharding import ParamShard
from gridformer.utils.errors import CheckpointError

_ALIGNED = 64  # bytes of memory at which each copy begins
PARAMETER = "model."  # before the names of parameters
# By global name, a local tensor and its position in the global tensor.
Shards = Mapping[str, tuple[Tensor, ParamShard]]
# The number of a list of names, and where blocks of these names begin and how large they are.
Position = tuple[int, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class TensorBlock:
    """A block of a global tensor."""

    tensor: Tensor  # the local tensor without its padding
    size: tuple[int, ...]  # the shape of the global tensor
    offset: tuple[int, ...]  # the index in the global tensor at which the block begins

    @staticmethod
    def of(local: Tensor, shard: ParamShard) -> TensorBlock:
        """Returns the block that a local tensor with this shard holds, without its padding."""
        return TensorBlock(shard.valid(local.detach()), shard.size, shard.offset)

    @property
    def n_bytes(self) -> int:
        """The size of the local tensor, which is 0 if that is all padding."""
        return self.tensor.numel() * self.tensor.element_size()

    def overlap(
        self, offset: tuple[int, ...], size: tuple[int, ...]
    ) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """Returns the slices of the block at an offset and of this one that overlap, if any do."""
        there, here = [], []
        for mine, n, other, m in zip(self.offset, self.tensor.shape, offset, size):
            begin, end = max(mine, other), min(mine + n, other + m)
            if begin >= end:
                return None
            there.append(slice(begin - other, end - other))
            here.append(slice(begin - mine, end - mine))
        return tuple(there), tuple(here)


def written_here(shards: Shards, axes: Axes) -> dict[str, TensorBlock]:
    """Returns the blocks that this rank writes. Exactly one of the replicas of a block writes it.

    Every replica computes by itself which one that is, because all of them hold the same blocks in
    the same order: each block goes to the replica that has the fewest bytes so far. If several
    stages share a block, the first one writes it.
    """
    loads: dict[str, list[int]] = defaultdict(list)
    written = {}
    for name, (local, shard) in shards.items():
        if shard.stages and axes.pp.index != shard.stages[0]:
            continue
        block = TensorBlock.of(local, shard)
        if not block.n_bytes:
            continue
        if shard.replicas is not None:
            axis = axes[shard.replicas]
            load = loads[axis.name] = loads[axis.name] or [0] * axis.size
            writer = load.index(min(load))
            load[writer] += block.n_bytes
            if writer != axis.index:
                continue
        written[name] = block
    return written


class StoredBlock(NamedTuple):
    """A block in a file: the names of file and tensor, its position in the global tensor."""

    file: str
    name: str
    offset: tuple[int, ...]
    size: tuple[int, ...]


class BlockIndex(Config):
    """Where the blocks of a checkpoint are: lists of names, and the blocks in each file."""

    names: list[list[str]]
    files: dict[str, list[Position]]

    def of(self, wanted: Collection[str]) -> Iterator[StoredBlock]:
        """Yields the blocks of some tensors."""
        chosen = [[name for name in names if name in wanted] for names in self.names]
        for file, positions in self.files.items():
            for number, offset, size in positions:
                for name in chosen[number]:
                    yield StoredBlock(file, name, offset, size)


def packed_part(blocks: Mapping[str, TensorBlock]) -> bytes:
    """Returns the part of an index for a file of these blocks, packed."""
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = defaultdict(list)
    for name, block in blocks.items():
        groups[block.offset, tuple(block.tensor.shape)].append(name)
    return zlib.compress(json.dumps([(names, *at) for at, names in groups.items()]).encode())


def joined_index(parts: Mapping[str, bytes]) -> BlockIndex:
    """Returns the index of all files, from the `packed_part` of each."""
    number_of: dict[tuple[str, ...], int] = {}
    files: dict[str, list[Position]] = {}
    for file, part in parts.items():
        files[file] = [
            (number_of.setdefault(tuple(names), len(number_of)), tuple(offset), tuple(size))
            for names, offset, size in json.loads(zlib.decompress(part))
        ]
    names = [[*some] for some in number_of]
    return BlockIndex.model_construct(names=names, files=files)  # it need not be checked


def blocks_for(
    index: BlockIndex, wanted: Mapping[str, TensorBlock], folder: Path
) -> dict[str, list[StoredBlock]]:
    """Returns the stored blocks from which wanted ones can be filled, by file.

    Raises:
        CheckpointError: A tensor is missing or incomplete, or has another global shape.
    """
    held: dict[str, int] = dict.fromkeys(wanted, 0)
    sizes: dict[str, tuple[int, ...]] = {}
    needed: dict[str, list[StoredBlock]] = defaultdict(list)
    for stored in index.of(wanted):
        ends = tuple(a + n for a, n in zip(stored.offset, stored.size))
        sizes[stored.name] = tuple(map(max, ends, sizes.get(stored.name, ends)))
        held[stored.name] += math.prod(stored.size)
        block = wanted[stored.name]
        if block.n_bytes and block.overlap(stored.offset, stored.size) is not None:
            needed[stored.file].append(stored)
    for name, block in wanted.items():
        if name not in sizes:
            raise CheckpointError(f"{folder} does not contain '{name}': it is of another model")
        if sizes[name] != tuple(block.size):
            raise CheckpointError(
                f"{folder} contains '{name}' with shape {list(sizes[name])}, but this run needs "
                f"{list(block.size)}: it is of another model"
            )
        if held[name] != math.prod(block.size):
            raise CheckpointError(f"{folder} contains only a part of '{name}': a file is missing")
    return needed


class Snapshot:
    """Memory for copies of blocks. It is kept from save to save, because it takes time to get.

    On a GPU the memory is pinned, and a stream of its own copies while the host goes on. The stream
    of the training waits for the copies on the GPU, so that an update cannot overwrite what is
    being copied.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    def take(self, blocks: Mapping[str, TensorBlock]) -> dict[str, TensorBlock]:
        """Copies blocks. The copies may be read after `wait`, until the next call."""
        device = next((b.tensor.device for b in blocks.values() if b.tensor.is_cuda), None)
        self.reserve(bytes_of(blocks), device is not None)
        if device is None:
            return self._filled(blocks)
        training = torch.cuda.current_stream(device)
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(training)
        with torch.cuda.stream(self._stream):
            copies = self._filled(blocks)
            self._copied = self._stream.record_event()
        training.wait_stream(self._stream)
        return copies

    def _filled(self, blocks: Mapping[str, TensorBlock]) -> dict[str, TensorBlock]:
        copies, begin = {}, 0
        for name, block in blocks.items():
            tensor, end = block.tensor.detach(), begin + block.n_bytes
            values = self._memory[begin:end].view(tensor.dtype)
            transposed = tensor.dim() == 2 and tensor.stride(0) < tensor.stride(1)
            copy = values.view(tensor.shape[::-1]).t() if transposed else values.view(tensor.shape)
            copies[name] = replace(block, tensor=copy.copy_(tensor, non_blocking=True))
            begin = _aligned(end)
        return copies

    def wait(self) -> None:
        """Waits until the copies are complete. The thread that writes them calls it."""
        if self._copied is not None:
            assert self._stream is not None
            # A thread begins with GPU 0, on which every process would open a second context.
            with torch.cuda.device(self._stream.device):
                self._copied.synchronize()

    def __del__(self) -> None:
        # Memory that is freed while it is pinned could not be pinned again by its next owner.
        with contextlib.suppress(Exception):
            self._unpin()

    def reserve(self, n_bytes: int, pinned: bool) -> None:
        """Takes memory for copies. Pinning it takes seconds, in which nothing runs on the GPU."""
        if self._memory.numel() >= n_bytes and self._pinned >= pinned:
            return
        self._unpin()
        self._memory = torch.empty(0, dtype=torch.uint8)  # frees the old one first
        self._memory = torch.empty(n_bytes, dtype=torch.uint8)
        if pinned:
            # Torch's own allocator of pinned memory rounds up to a power of two.
            runtime = torch.cuda.cudart()
            status = runtime.cudaHostRegister(self._memory.data_ptr(), n_bytes, 0)
            self._pinned = int(status) == 0  # otherwise copying is slower, but right
            if not self._pinned:
                with contextlib.suppress(RuntimeError):  # the next kernel would report the failure
                    torch.zeros(1, device="cuda")

    def _unpin(self) -> None:
        if self._pinned:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
            self._pinned = False


def bytes_of(blocks: Mapping[str, TensorBlock]) -> int:
    """Returns the bytes that copies of blocks take."""
    return sum(_aligned(block.n_bytes) for block in blocks.values())


def _aligned(n_bytes: int) -> int:
    return math.ceil(n_bytes / _ALIGNED) * _ALIGNED
