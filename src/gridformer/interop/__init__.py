"""The parameters of a running model in the terms of torch.distributed, for other programs.

`state_dict` is what torch.distributed.checkpoint saves and loads under every layout, and
`dtensor_views` are DTensors, for layouts that DTensors can express: those of even divisions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from gridformer.mesh import Axes
from gridformer.parallel.data.zero import stored
from gridformer.parallel.sharding import ParamShard, info_of, shard_of
from gridformer.utils.errors import UserError

# Replicas shard what a device of one replica holds, so their axis is the innermost one.
_REPLICAS = "dp"


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


def dtensor_views(model: nn.Module, axes: Axes) -> dict[str, Tensor]:
    """Returns this rank's parameters of a model of `build_parallel` as DTensors, by name.

    They have global shapes and share the memory of the parameters, and their names are those of the
    plain model. With pipeline stages, each rank returns the parameters of its own stages, on the
    mesh of the ranks that have the same stages. Where that is one rank, they are plain tensors.

    Raises:
        UserError: A DTensor cannot express how some parameters are sharded. It names all of them:
            blocks of a padded vocabulary that are not those of an even division, heads of keys that
            several columns hold, and layers that replicas and branches shard together.
    """
    mesh = _mesh_of(axes)
    views: dict[str, Tensor] = {}
    left_out = []
    for name, parameter in model.named_parameters():
        kept = stored(parameter)
        local = shard_of(kept).valid(kept.detach())
        if mesh is None:
            views[name] = local
        elif (placements := _placements(parameter, mesh, axes)) is None:
            left_out.append(name)
        else:
            size = torch.Size(shard_of(parameter).size)
            stride = torch.empty(size, device="meta").stride()
            views[name] = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=size, stride=stride
            )
    if left_out:
        raise UserError(
            f"DTensors cannot express how these parameters are sharded: {', '.join(left_out)}; use "
            "a layout whose columns and replicas divide the vocabulary and the heads of keys, or "
            "gridformer.interop.state_dict, which torch.distributed.checkpoint reads on any layout"
        )
    return views


def _mesh_of(axes: Axes) -> DeviceMesh | None:
    """Returns the mesh of the ranks with this rank's stages, or None if it is the only one."""
    if axes.places is None:
        return None
    names = list(axes.places.names)
    ranks = torch.tensor(axes.places.ranks).view(axes.places.shape)
    if "pp" in names:
        ranks = ranks.select(names.index("pp"), axes.pp.index)
        names.remove("pp")
    order = sorted(names, key=lambda name: name == _REPLICAS)
    ranks = ranks.permute([names.index(name) for name in order])
    dims = [name for name in order if axes[name].size > 1]
    if not dims:
        return None
    return DeviceMesh.from_group(
        [axes[name].group or dist.group.WORLD for name in dims],  # type: ignore[misc]
        axes.device_type,
        ranks.reshape([axes[name].size for name in dims]),
        mesh_dim_names=tuple(dims),
    )


def _placements(parameter: nn.Parameter, mesh: DeviceMesh, axes: Axes) -> list[Placement] | None:
    """Returns how a parameter is sharded over the mesh; None if placements cannot express it."""
    info, names = info_of(parameter), mesh.mesh_dim_names or ()
    placements: list[Placement] = [Replicate() for _ in names]
    lengths = [{n} for n in info.shard.size]  # of the blocks along each dimension
    for dim, name in enumerate(info.cut):
        if name is None or axes[name].size == 1:
            continue
        block, size, n = parameter.shape[dim], info.shard.size[dim], axes[name].size
        if name not in names or block != -(-size // n):
            return None
        placements[names.index(name)] = Shard(dim)
        lengths[dim] = {max(0, min(block, size - i * block)) for i in range(n)}
    if info.resharded:
        dim = 1 if info.shard.transposed else 0
        parts = {math.ceil(length / axes.dp.size) for length in lengths[dim] if length}
        if info.shard.replicas != _REPLICAS or len(parts) > 1:
            return None
        placements[names.index(_REPLICAS)] = Shard(dim)
    return placements
