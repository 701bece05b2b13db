"""How a parameter is sharded: `ParamInfo`, the one record that is attached to it."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from gridformer.mesh import Axes
from gridformer.models.blocks import Init, init_of
from gridformer.utils.tensors import TensorAttribute


@dataclass(frozen=True)
class ParamPlacement:
    """How a parameter is sharded and replicated over the mesh.

    Attributes:
        cut: For each dimension, the axis that shards it, or None. Each rank of that axis holds one
            block.
        copies: The axis along which every rank holds a copy. The copy at index 0 is the owner: it
            alone is updated, decayed, counted in the gradient norm and saved. The others receive
            its value after each step.
        partial: Whether the gradients of the copies are partial sums, which are added up on the
            owner. They are if tokens are sharded along `copies`; otherwise they are all equal.
        replicas: The axis along which every rank holds and updates a copy, whose gradients are
            summed: `dp`, or `dp_branch` for layers outside branches if every device has different
            samples there.
        pad: For each dimension, the multiple to which its global size is padded with zeros if it is
            sharded. 0 stands for the size of the axis, and so does an empty tuple for all of them.
        transposed: Whether the block of a matrix is stored column by column, because products read
            it in that order.
    """

    cut: tuple[str | None, ...]
    copies: str | None = None
    partial: bool = False
    replicas: str = "dp"
    pad: tuple[int, ...] = ()
    transposed: bool = False


@dataclass(frozen=True)
class ParamShard:
    """Which block of a global tensor one device holds, and which ranks hold the same block.

    Attributes:
        size: The shape of the global tensor, without padding.
        offset: Where the block begins in the global tensor. Elements of the block beyond `size` are
            padding and stay zero.
        replicas: As in `ParamPlacement`. If replicas shard the block, it is the axis of those that
            do, and that of a part the axis of those that hold the same part, or None.
        owned: Whether this device's copy is the owner.
        stages: Indices along pp of the ranks that hold and update the block, if there are several,
            as for the tied embedding of a pipeline.
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
        """Returns a view of the block `local` without its padding."""
        for dim, (size, offset) in enumerate(zip(self.size, self.offset)):
            local = local.narrow(dim, 0, max(0, min(local.shape[dim], size - offset)))
        return local

    def block_of(self, whole: Tensor, shape: torch.Size) -> Tensor:
        """Returns a copy of this device's block of a global tensor, with zeros beyond it."""
        local = whole.new_zeros(shape)
        part = self.valid(local)
        for dim, offset in enumerate(self.offset):
            whole = whole.narrow(dim, min(offset, whole.shape[dim]), part.shape[dim])
        part.copy_(whole)
        return local


class ParamGroup(Protocol):
    """Parameters that are materialized together (gridformer.parallel.data.fsdp)."""

    def unshard(self) -> None:
        """Allocates and fills the parameters, unless they are materialized."""

    def forget(self) -> None:
        """Frees what was derived from values that have been updated."""


@dataclass
class ParamInfo:
    """All that gridformer records about a parameter of this device.

    Attributes:
        shard: Which block of the global tensor it is, and which ranks hold the same block.
        init: How the global tensor is initialized; None if the network is not one of
            gridformer.models.
        replica_part: The rows of the block that this replica updates (dp_mode zero1 and fsdp), a
            parameter with a ParamInfo of its own; None if every replica updates the full block.
        resharded: Whether only `replica_part` is in memory between steps (dp_mode fsdp).
        group: The group with which the block is materialized; None if it is always in memory.
        cut: For each dimension, the axis that shards it, or None; empty for a plain model.
    """

    shard: ParamShard
    init: Init | None
    replica_part: nn.Parameter | None = None
    resharded: bool = False
    group: ParamGroup | None = None
    cut: tuple[str | None, ...] = ()


_INFO = TensorAttribute[ParamInfo]("info")


def info_of(parameter: Tensor) -> ParamInfo:
    """Returns the ParamInfo of a parameter; for a plain model's a new one that is not attached."""
    info = _INFO.get(parameter)
    if info is None:
        whole = ParamShard(tuple(parameter.shape), (0,) * parameter.dim())
        return ParamInfo(whole, init_of(parameter))
    return info


def set_info(parameter: nn.Parameter, info: ParamInfo) -> nn.Parameter:
    """Attaches a ParamInfo to a parameter and returns the parameter."""
    _INFO.set(parameter, info)
    return parameter


def shard_of(parameter: Tensor) -> ParamShard:
    """Returns the shard of a parameter; for one of a plain model, the full tensor."""
    return info_of(parameter).shard


def replica_axis(parameter: nn.Parameter) -> str:
    """Returns the name of the axis over which a parameter's gradients are summed."""
    name = shard_of(parameter).replicas
    assert name is not None, "the part that one replica updates has no replicas"
    return name


def shared_by_stages(model: nn.Module) -> dict[tuple[int, ...], list[tuple[str, nn.Parameter]]]:
    """Returns the parameters that several stages share, by stages, in one order on all ranks."""
    shared: dict[tuple[int, ...], list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if shard_of(parameter).stages:
            shared[shard_of(parameter).stages].append((name, parameter))
    return dict(sorted(shared.items()))


def is_sharded(parameter: Tensor) -> bool:
    """Returns whether a parameter has a ParamInfo, as all have that `place` made."""
    return _INFO.get(parameter) is not None


def shard_parameter(module: nn.Module, name: str, placement: ParamPlacement, axes: Axes) -> None:
    """Replaces a full parameter of a module by this device's block, on the meta device."""
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
    # An axis of a part of the mesh may have another name there, such as col for branch.
    cut = tuple(axes[name].name if name else None for name in placement.cut)
    setattr(module, name, set_info(local, ParamInfo(shard, init_of(whole), cut=cut)))


def vocabulary_multiple(axes: Axes) -> int:
    """Returns the multiple to which a vocabulary is padded: rows cut tables, columns logits."""
    return math.lcm(axes.row.size, axes.col.size)


def vocabulary_width(axes: Axes, vocab_size: int) -> int:
    """Returns how many words of a vocabulary a column of devices has logits for, with padding."""
    return _round_up(vocab_size, vocabulary_multiple(axes)) // axes.col.size


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
