"""The parameters of a running model as torch.distributed.checkpoint saves and loads them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from gridformer.parallel.data.zero import stored
from gridformer.parallel.sharding import ParamShard, shard_of


class GlobalBlock(Tensor):
    """This rank's block of a global tensor, in the memory of a parameter.

    torch.distributed.checkpoint asks the tensors of a state dict for their blocks by the three
    methods with underscores. Compute with `tensor` instead.
    """

    global_size: torch.Size  # the shape of the global tensor
    offset: torch.Size  # where the block begins in it

    @staticmethod
    def of(local: Tensor, shard: ParamShard) -> GlobalBlock:
        """Returns the block that a local tensor with this shard holds, without its padding."""
        block = shard.valid(local.detach()).as_subclass(GlobalBlock)
        block.global_size, block.offset = torch.Size(shard.size), torch.Size(shard.offset)
        return block

    @property
    def tensor(self) -> Tensor:
        """The block as an ordinary tensor, in the same memory."""
        return self.as_subclass(Tensor)

    def size(self, dim: int | None = None) -> Any:
        """Returns the shape of the global tensor, which a checkpoint must have."""
        return self.global_size if dim is None else self.global_size[dim]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        shape = self.tensor.shape
        return [ChunkStorageMetadata(self.offset, shape)] if shape.numel() else []

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, self.offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.global_size),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset == self.offset, f"{index} is not the block at {self.offset}"
        return self.tensor


def state_dict(model: nn.Module) -> dict[str, GlobalBlock]:
    """Returns this rank's blocks of all parameters of a model of `build_parallel`, by name.

    `torch.distributed.checkpoint.save` writes them under the names and shapes of the plain model,
    once where several ranks hold the same block. `torch.distributed.checkpoint.load` fills the
    parameters in place.
    """
    return {
        name: GlobalBlock.of(stored(parameter), shard_of(stored(parameter)))
        for name, parameter in model.named_parameters()
    }
