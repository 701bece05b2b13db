"""Blocks of tensors in and out of safetensors files, through torch.distributed.checkpoint.

A checkpoint is a set of named global tensors; each file holds blocks of them with their offsets.
Which blocks a reader asks for has nothing to do with which were written, so a run moves between
layouts. Only safetensors are read and written: DCP's own format unpickles its index on load.
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

from gridformer.parallel.sharding import ParamShard
from gridformer.utils.errors import CheckpointError


@dataclass(frozen=True)
class Block:
    """A local tensor without its padding, and where it lies in a global one of shape `size`."""

    tensor: Tensor
    size: tuple[int, ...]
    offset: tuple[int, ...]

    @staticmethod
    def of(local: Tensor, shard: ParamShard) -> Block:
        return Block(shard.valid(local.detach()), shard.size, shard.offset)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offset), self.tensor.size())

    @property
    def empty(self) -> bool:
        """All padding: there is nothing to save or load."""
        return self.tensor.numel() == 0


def write_blocks(shards: Mapping[str, tuple[Tensor, ParamShard]], folder: Path) -> None:
    """Write the blocks of all ranks; equal blocks of several ranks (replicas) are written once.

    shards: local tensors by name, and where each lies.
    """
    blocks = _blocks(shards)
    with _no_warning_of_one_process():
        dcp.save(
            {},
            storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
            planner=_SavePlanner(blocks),
            no_dist=not dist.is_initialized(),
        )


def read_blocks(shards: Mapping[str, tuple[Tensor, ParamShard]], folder: Path) -> None:
    """Fill local tensors, in place, from whatever blocks were written.

    Raises CheckpointError where a tensor is missing or has another global shape.
    """
    blocks = _blocks(shards)
    try:
        with _no_warning_of_one_process():
            dcp.load(
                {},
                storage_reader=HuggingFaceStorageReader(str(folder)),
                planner=_LoadPlanner(blocks, folder),
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
        return self.blocks[index.fqn].tensor.contiguous()  # blocks may lie transposed in memory


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
        raise CheckpointError(f"{folder} does not hold '{name}': it is of another model")
    if tuple(stored.size) != block.size:
        raise CheckpointError(
            f"{folder} holds '{name}' of shape {list(stored.size)}, but this run's is "
            f"{list(block.size)}: it is of another model"
        )
    held = sum(chunk.sizes.numel() for chunk in stored.chunks)
    if held != torch.Size(block.size).numel():
        raise CheckpointError(f"{folder} holds parts of '{name}' only: a file is missing")
    return stored
