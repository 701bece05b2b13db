"""What gridformer knows of a parameter: `ParamInfo`, the one record that a parameter carries.

info_of(parameter).shard    the block of the global tensor that this device holds, and its owner
place(module, name, ParamPlacement(cut=("row", "col")), axes)    cuts a parameter over the mesh
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from gridformer.mesh import Axes
from gridformer.models.blocks import Init, init_of

_ATTRIBUTE = "_gridformer_info"


@dataclass(frozen=True)
class ParamPlacement:
    """How a parameter lies on the mesh.

    cut: for each dimension the axis that cuts it, or None. Each rank of that axis holds one block.
    copies: the axis along which every rank holds a copy. One copy, at index 0, is the owner: it
        alone is updated, decayed, counted in the gradient norm and saved; the others receive its
        value after each step.
    partial: whether the copies' gradients are partial sums, to be added on the owner (they are
        where tokens are cut along `copies`, and are equal everywhere otherwise).
    replicas: the axis along which every rank holds and updates a copy, whose gradients are summed:
        `dp`, or `dp_branch` where the layers outside branches see other samples on every device.
    pad: for each dimension the multiple to which the global size is padded with zeros where it is
        cut; 0, or nothing at all, means the axis's size.
    transposed: a matrix whose block is stored column by column, because products read it so.
    """

    cut: tuple[str | None, ...]
    copies: str | None = None
    partial: bool = False
    replicas: str = "dp"
    pad: tuple[int, ...] = ()
    transposed: bool = False


@dataclass(frozen=True)
class ParamShard:
    """One device's part of a parameter.

    The local tensor is the block that begins at `offset` of the global tensor of true shape
    `size`; what overhangs `size` is padding and stays zero. replicas: None of a part that is one
    replica's alone (gridformer.parallel.data.zero). stages: indices along pp of the ranks that hold
    and update it, where several do: the tied embedding of a pipeline.
    """

    size: tuple[int, ...]
    offset: tuple[int, ...]
    copies: str | None = None
    partial: bool = False
    replicas: str | None = "dp"
    owned: bool = True
    transposed: bool = False
    stages: tuple[int, ...] = ()

    def valid(self, local: Tensor) -> Tensor:
        """The part of the local tensor that is not padding (a view)."""
        for dim, (size, offset) in enumerate(zip(self.size, self.offset)):
            local = local.narrow(dim, 0, max(0, min(local.shape[dim], size - offset)))
        return local

    def block_of(self, whole: Tensor, shape: torch.Size) -> Tensor:
        """This device's block of a whole tensor, zero-padded to the local `shape`."""
        local = whole.new_zeros(shape)
        part = self.valid(local)
        for dim, offset in enumerate(self.offset):
            whole = whole.narrow(dim, min(offset, whole.shape[dim]), part.shape[dim])
        part.copy_(whole)
        return local


class ParamGroup(Protocol):
    """Parameters that are materialized together (gridformer.parallel.data.fsdp)."""

    def unshard(self) -> None: ...


@dataclass
class ParamInfo:
    """What gridformer knows of a parameter of this device.

    Args:
        shard: which block of the global tensor the local one is, and who else holds it.
        init: how the global tensor begins; None of a network that is not ours.
        replica_part: the rows that this replica updates (dp_mode zero1 and fsdp), a parameter with
            a ParamInfo of its own; None where every replica updates the whole block.
        resharded: whether `replica_part` is all that lies in memory between steps (dp_mode fsdp).
        group: materializes the whole block, with others; None where it always is in memory.
    """

    shard: ParamShard
    init: Init | None
    replica_part: nn.Parameter | None = None
    resharded: bool = False
    group: ParamGroup | None = None


def info_of(parameter: Tensor) -> ParamInfo:
    """The ParamInfo of a parameter; that of a plain model's parameter says that it is whole.

    Only what `set_info` has attached may be changed in place.
    """
    info: ParamInfo | None = getattr(parameter, _ATTRIBUTE, None)
    if info is None:
        whole = ParamShard(tuple(parameter.shape), (0,) * parameter.dim())
        return ParamInfo(whole, init_of(parameter))
    return info


def set_info(parameter: nn.Parameter, info: ParamInfo) -> nn.Parameter:
    """Attach a ParamInfo to a parameter, which is returned."""
    setattr(parameter, _ATTRIBUTE, info)
    return parameter


def shard_of(parameter: Tensor) -> ParamShard:
    """The shard of a parameter; one of a plain model is whole and its own."""
    return info_of(parameter).shard


def is_placed(parameter: Tensor) -> bool:
    """Whether `place` made this parameter."""
    return hasattr(parameter, _ATTRIBUTE)


def place(module: nn.Module, name: str, placement: ParamPlacement, axes: Axes) -> None:
    """Replace a whole (meta) parameter of `module` by this device's block, still unallocated."""
    whole = module.get_parameter(name)
    size, offset = list(whole.shape), [0] * whole.dim()
    for dim, axis_name in enumerate(placement.cut):
        if axis_name is None:
            continue
        axis = axes[axis_name]
        multiple = placement.pad[dim] if placement.pad else 0
        padded = _round_up(size[dim], multiple or axis.size)
        size[dim] = padded // axis.size
        offset[dim] = axis.index * size[dim]
    copies = placement.copies if placement.copies and axes[placement.copies].size > 1 else None
    local = nn.Parameter(torch.empty(size, device="meta", dtype=whole.dtype))
    shard = ParamShard(
        size=tuple(whole.shape),
        offset=tuple(offset),
        copies=copies,
        partial=placement.partial and copies is not None,
        replicas=placement.replicas,
        owned=copies is None or axes[copies].index == 0,
        transposed=placement.transposed,
    )
    setattr(module, name, set_info(local, ParamInfo(shard, init_of(whole))))


def vocabulary_multiple(axes: Axes) -> int:
    """What a vocabulary is padded to a multiple of: it is cut over rows (table) and columns."""
    return math.lcm(axes.row.size, axes.col.size)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
