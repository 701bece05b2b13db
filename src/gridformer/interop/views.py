"""DTensor views of the parameters of a running model.

A view shares the memory of the parameter. Names are those of the plain model, whatever the layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from gridformer.mesh import Axes
from gridformer.parallel.data.zero import stored
from gridformer.parallel.sharding import info_of, shard_of
from gridformer.utils.errors import UserError

# Replicas shard what a device of one replica holds, so their axis is the innermost one.
_REPLICAS = "dp"


def dtensor_views(model: nn.Module, axes: Axes) -> dict[str, Tensor]:
    """Returns the parameters of this rank as DTensors of their global shapes, by name.

    With pipeline stages, each rank returns the parameters of its own stages, on the mesh of the
    ranks that have the same stages. Where that is one rank, they are plain tensors.

    Args:
        model: A model that `gridformer.parallel.build_parallel` has built.
        axes: The axes of this process.

    Raises:
        UserError: A DTensor cannot express how some parameters are sharded. It names all of them:
            blocks of a padded vocabulary that are not those of an even division, heads of keys that
            several columns hold, and layers that replicas and branches shard together.
    """
    mesh = _mesh_of(axes)
    found: dict[str, Tensor] = {}
    left_out = []
    for name, parameter in model.named_parameters():
        kept = stored(parameter)
        local = shard_of(kept).valid(kept.detach())
        if mesh is None:
            found[name] = local
            continue
        placements = _placements(parameter, mesh, axes)
        if placements is None:
            left_out.append(name)
            continue
        size = torch.Size(shard_of(parameter).size)
        found[name] = DTensor.from_local(
            local,
            mesh,
            placements,
            run_check=False,
            shape=size,
            stride=torch.empty(size, device="meta").stride(),
        )
    if left_out:
        raise UserError(
            f"DTensors cannot express how these parameters are sharded: {', '.join(left_out)}; use "
            "a layout whose columns and replicas divide the vocabulary and the heads of keys, or "
            "gridformer.interop.state_dict, which torch.distributed.checkpoint reads on any layout"
        )
    return found


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
    groups = [axes[name].group or dist.group.WORLD for name in dims]
    return DeviceMesh.from_group(
        groups,  # type: ignore[arg-type]
        axes.device_type,
        ranks.reshape([axes[name].size for name in dims]),
        mesh_dim_names=tuple(dims),
    )


def _placements(parameter: nn.Parameter, mesh: DeviceMesh, axes: Axes) -> list[Placement] | None:
    """Returns how a parameter is sharded over the mesh; None if placements cannot express it."""
    info = info_of(parameter)
    names = mesh.mesh_dim_names or ()
    found: list[Placement] = [Replicate() for _ in names]
    lengths = [{n} for n in info.shard.size]  # of the blocks along each dimension
    for dim, name in enumerate(info.cut):
        if name is None or axes[name].size == 1:
            continue
        block, size, n = parameter.shape[dim], info.shard.size[dim], axes[name].size
        if name not in names or block != -(-size // n):
            return None
        found[names.index(name)] = Shard(dim)
        lengths[dim] = {max(0, min(block, size - i * block)) for i in range(n)}
    if info.resharded:
        dim = 1 if info.shard.transposed else 0
        if info.shard.replicas != _REPLICAS or not _alike(lengths[dim], axes.dp.size):
            return None
        found[names.index(_REPLICAS)] = Shard(dim)
    return found


def _alike(lengths: Iterable[int], n: int) -> bool:
    """Returns whether blocks of these lengths have equally long parts when divided among n."""
    return len({math.ceil(length / n) for length in lengths if length}) <= 1
