"""Reads and writes blocks of tensors in safetensors files with torch.distributed.checkpoint (DCP).

A checkpoint is a set of named global tensors; each file holds blocks of them with their offsets. A
reader may ask for other blocks than were written, so a run can resume under another layout. Only
safetensors are read and written, because DCP's own format unpickles its index on load.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from gridformer.mesh.groups import objects_group
from gridformer.parallel.sharding import ParamShard
from gridformer.utils.errors import CheckpointError


@dataclass(frozen=True)
class Block:
    """A block of a global tensor.

    Attributes:
        tensor: The local tensor without its padding.
        size: The shape of the global tensor.
        offset: The index in the global tensor at which the block begins.
    """

    tensor: Tensor
    size: tuple[int, ...]
    offset: tuple[int, ...]

    @staticmethod
    def of(local: Tensor, shard: ParamShard) -> Block:
        """Returns the block that a local tensor with this shard holds, without its padding."""
        return Block(shard.valid(local.detach()), shard.size, shard.offset)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The position of the block in the form that DCP uses."""
        return ChunkStorageMetadata(torch.Size(self.offset), self.tensor.size())

    @property
    def empty(self) -> bool:
        """Whether the local tensor is all padding, so that there is nothing to save or load."""
        return self.tensor.numel() == 0


def write_blocks(shards: Mapping[str, tuple[Tensor, ParamShard]], folder: Path) -> None:
    """Writes the blocks of all ranks, which call it together, into `folder`.

    A block that several ranks hold (replicas) is written once.

    Args:
        shards: By global name, this rank's local tensor and its position in the global tensor.
        folder: An existing folder on storage that all ranks share.
    """
    blocks = _blocks(shards)
    with _no_warning_of_one_process():
        dcp.save(
            {},
            storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
            planner=_SavePlanner(blocks),
            process_group=objects_group(),
            no_dist=not dist.is_initialized(),
        )


def read_blocks(shards: Mapping[str, tuple[Tensor, ParamShard]], folder: Path) -> None:
    """Fills local tensors in place from the blocks in `folder`, whichever layout wrote them.

    Args:
        shards: By global name, this rank's local tensor and its position in the global tensor.
        folder: A folder that `write_blocks` filled.

    Raises:
        CheckpointError: A tensor is missing or incomplete, or has another global shape.
    """
    blocks = _blocks(shards)
    try:
        with _no_warning_of_one_process():
            dcp.load(
                {},
                storage_reader=HuggingFaceStorageReader(str(folder)),
                planner=_LoadPlanner(blocks, folder),
                process_group=objects_group(),
                no_dist=not dist.is_initialized(),
            )
    except dcp.api.CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, CheckpointError):
                raise cause from None
        raise


def _blocks(shards: Mapping[str, tuple[Tensor, ParamShard]]) -> dict[str, Block]:
    return {name: Block.of(local, shard) for name, (local, shard) in shards.items()}


@contextmanager
def _no_warning_of_one_process() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class _SavePlanner(DefaultSavePlanner):
    def __init__(self, blocks: Mapping[str, Block]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.blocks = blocks

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                index=MetadataIndex(name, block.offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=block.chunk,
                    properties=TensorProperties.create_from_tensor(block.tensor),
                    size=torch.Size(block.size),
                ),
            )
            for name, block in self.blocks.items()
            if not block.empty
        ]
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.blocks[index.fqn].tensor.contiguous()  # a block may be a transposed view


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, blocks: Mapping[str, Block], folder: Path) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.blocks, self.folder = blocks, folder

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, block in self.blocks.items():
            stored = _stored(self.metadata, name, block, self.folder)
            if not block.empty:
                items += create_read_items_for_chunk_list(name, stored, [block.chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.blocks[index.fqn].tensor


def _stored(metadata: Metadata, name: str, block: Block, folder: Path) -> TensorStorageMetadata:
    stored = metadata.state_dict_metadata.get(name)
    if not isinstance(stored, TensorStorageMetadata):
        raise CheckpointError(f"{folder} does not contain '{name}': it is of another model")
    if tuple(stored.size) != block.size:
        raise CheckpointError(
            f"{folder} contains '{name}' with shape {list(stored.size)}, but this run needs "
            f"{list(block.size)}: it is of another model"
        )
    held = sum(chunk.sizes.numel() for chunk in stored.chunks)
    if held != torch.Size(block.size).numel():
        raise CheckpointError(f"{folder} contains only a part of '{name}': a file is missing")
    return stored
