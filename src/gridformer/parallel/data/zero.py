"""ZeRO: replicas shard, by rows of parameters, what all of them would otherwise hold.

    dp_mode      parameters    gradients        optimizer state    source
    replicate    full          full             full               -
    zero1        full          parts, summed    parts              ZeRO-1, Rajbhandari et al. 2020
    fsdp         parts         parts, summed    parts              ZeRO-3, FSDP, Zhao et al. 2023

A part consists of adjacent rows of the local block, or of columns if the block is stored
transposed: it is contiguous in memory, and a rectangle of the global tensor, as checkpoints store
them. Of experts [e, n, m] that is some of them, or some rows of one if replicas are a multiple.

With several micro-batches every device accumulates full gradients until its last backward pass sums
them, with fsdp too, unless each pass sums its own (`layout.gradient_sync: micro_batch`).
With `layout.shard_over: N` only N neighboring replicas shard; parts have replicas in other groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from gridformer.mesh import Axes, Axis
from gridformer.models.blocks import gradient_slot
from gridformer.parallel.sharding import ParamInfo, info_of, set_info, shard_of
from gridformer.utils.tensors import allocate_storage, free_storage

Mode = Literal["replicate", "zero1", "fsdp"]


def cut_over_replicas(parameter: nn.Parameter, axes: Axes, mode: Mode) -> None:
    """Gives an initialized parameter its `replica_part`; with fsdp the rest is freed.

    With zero1, a copy that is not the owner gets no part, because it is never updated.
    """
    info = info_of(parameter)
    shard = info.shard
    axis = axes.sharding(shard.replicas) if shard.replicas else Axis("none")
    frozen = not parameter.requires_grad  # no gradient tells when it is read for the last time
    if frozen or mode == "replicate" or axis.size == 1 or (mode == "zero1" and not shard.owned):
        return
    rows, _ = _shape_in_rows(parameter, axis.size)
    each = -(-rows // axis.size)
    start = min(rows, axis.index * each)
    dim, n = int(shard.transposed), min(each, rows - start)
    rows_here, offset = parameter.data, list(shard.offset)
    if rows > parameter.shape[dim]:
        expert, start = divmod(start, parameter.shape[1])
        rows_here, dim = rows_here.narrow(0, expert, 1), 1
        offset[0] += expert
    rows_here = rows_here.narrow(dim, start, n)
    offset[dim] += start
    part = nn.Parameter(rows_here.clone() if mode == "fsdp" else rows_here)
    across = axis.across.name if axis.across else None
    set_info(part, ParamInfo(replace(shard, offset=tuple(offset), replicas=across), info.init))
    shard = replace(shard, replicas=axis.name)
    set_info(parameter, replace(info, shard=shard, replica_part=part, resharded=mode == "fsdp"))
    if mode == "fsdp":
        free_storage(parameter)


def replica_part(parameter: nn.Parameter) -> nn.Parameter | None:
    """Returns the rows of a parameter that this replica updates; None if no replica has its own."""
    return info_of(parameter).replica_part


def own_part(parameter: nn.Parameter) -> nn.Parameter:
    """Returns what this rank updates of a parameter that it owns: its part, or the parameter."""
    part = replica_part(parameter)
    return parameter if part is None else part


def stored(parameter: nn.Parameter) -> nn.Parameter:
    """Returns what is in memory between steps: with fsdp this replica's part, else `parameter`."""
    info = info_of(parameter)
    return info.replica_part if info.resharded and info.replica_part is not None else parameter


def reserve_padding(parameters: Iterable[nn.Parameter], axes: Axes) -> None:
    """Lets gradients be computed in memory that has room for the padding of their message.

    `FlatBucket.join` then need not copy a gradient that travels alone and whose rows do not divide.
    """
    for parameter in parameters:
        slot = gradient_slot(parameter)
        if slot is not None and replica_part(parameter) is not None:
            axis = axes[shard_of(parameter).replicas or ""]
            slot.elements = FlatBucket([parameter], axis).share * axis.size


class FlatBucket:
    """The layout of a message that carries several parameters: [replicas, share].

    A replica's share consists of its parts of all parameters, one after the other. The shares are
    equally long, `share` elements: where the last replicas have fewer rows, zeros take their place.
    All parameters have a `replica_part` and one dtype.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], axis: Axis) -> None:
        self.parameters, self.axis = list(parameters), axis
        self._shapes = [_shape_in_rows(p, axis.size) for p in self.parameters]
        self._each = [-(-rows // axis.size) for rows, _ in self._shapes]
        sizes = [each * width for each, (_, width) in zip(self._each, self._shapes)]
        self._starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.share = sum(sizes)
        rows = (n for n, _ in self._shapes)
        self._padded = any(each * axis.size > n for each, n in zip(self._each, rows))

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns tensors, each with the shape of its parameter, as one [replicas, share].

        A single tensor whose rows divide evenly already has this form, so it is not copied. Neither
        is a single gradient in memory with the padding that `reserve_padding` provides.
        """
        if len(tensors) == 1:
            rows, shape = _rows_of(tensors[0], self.parameters[0]), (self.axis.size, self.share)
            if not self._padded:
                return rows.reshape(shape)
            room = rows.untyped_storage().nbytes() // rows.element_size()
            if rows.is_contiguous() and not rows.storage_offset() and room == math.prod(shape):
                # What lies in the padding belongs to no replica's part.
                return rows.as_strided(shape, (self.share, 1))
        flat = self._room(tensors[0], (self.axis.size, self.share))
        for in_flat, in_tensor in self._places(flat, tensors):
            in_flat.copy_(in_tensor)
        return flat

    def part(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copies `flat` [replicas, share] into full tensors; the reverse of `join`."""
        for in_flat, in_tensor in self._places(flat, tensors):
            in_tensor.copy_(in_flat)

    def join_parts(self, dtype: torch.dtype | None = None) -> Tensor:
        """Returns this replica's parts of all parameters as one new tensor [share]."""
        parts = [self._part(parameter) for parameter in self.parameters]
        flat = self._room(parts[0], (self.share,), dtype)
        for part, view in zip(parts, self.parts(flat)):
            view.copy_(part)
        return flat

    def parts(self, share: Tensor) -> list[Tensor]:
        """Returns views of a share [share], one for each parameter.

        Each has the shape and memory order of this replica's part of the parameter.
        """
        views, begins = [], share.storage_offset()
        for i, parameter in enumerate(self.parameters):
            part = replica_part(parameter)
            assert part is not None
            (_, width), strides = self._shapes[i], [1]
            if part.dim() > 1:
                strides = [1, width] if shard_of(parameter).transposed else [*part.stride()]
            views.append(share.as_strided(part.shape, strides, begins + self._starts[i]))
        return views

    def _room(
        self, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> Tensor:
        """Returns memory for a message that is about to be filled, zeros if it is padded."""
        if self._padded:
            return like.new_zeros(shape, dtype=dtype)
        return like.new_empty(shape, dtype=dtype)

    def _places(self, flat: Tensor, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields pairs of views: some rows in the message, and the same rows in a tensor.

        `as_strided` makes each in one operation; slices and reshapes would be eight for a pair.
        """
        begins = flat.storage_offset()
        for i, (parameter, tensor) in enumerate(zip(self.parameters, tensors)):
            tensor = tensor.detach() if tensor.requires_grad else tensor
            tensor = tensor if tensor.dim() <= 2 else tensor.contiguous()  # a gradient may not be
            (n, width), each, start = self._shapes[i], self._each[i], begins + self._starts[i]
            full, rest = divmod(n, each)
            down, along = (width, 1) if tensor.dim() > 2 else _row_strides(tensor, parameter)
            shape, first = (full, each, width), tensor.storage_offset()
            in_full = flat.as_strided(shape, (flat.stride(0), width, 1), start)
            yield in_full, tensor.as_strided(shape, (each * down, down, along), first)
            if rest:
                last = flat.as_strided((rest, width), (width, 1), start + full * flat.stride(0))
                first += full * each * down
                yield last, tensor.as_strided((rest, width), (down, along), first)

    @staticmethod
    def _part(parameter: nn.Parameter) -> Tensor:
        part = replica_part(parameter)
        assert part is not None, "a parameter in a flat bucket is not sharded over replicas"
        return part.data


def _shape_in_rows(parameter: nn.Parameter, replicas: int) -> tuple[int, int]:
    """Returns how many rows replicas shard, and the elements of a row. Reads only the shape."""
    if shard_of(parameter).transposed:
        return parameter.shape[1], parameter.shape[0]
    rows, *inner = parameter.shape
    if len(inner) == 2 and rows and replicas % rows == 0 and inner[0] % (replicas // rows) == 0:
        return rows * inner[0], inner[1]
    return rows, math.prod(inner)


def _row_strides(tensor: Tensor, parameter: nn.Parameter) -> tuple[int, int]:
    """Returns the strides of `_rows_of(tensor, parameter)`."""
    if tensor.dim() != 2:
        return tensor.stride(0), 1
    down, along = tensor.stride()
    return (along, down) if shard_of(parameter).transposed else (down, along)


def _rows_of(tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    """Returns a tensor like `parameter` as a matrix (a view) whose rows replicas shard."""
    tensor = tensor.detach()
    if tensor.dim() == 1:
        return tensor.unsqueeze(1)
    return tensor.t() if shard_of(parameter).transposed else tensor.flatten(1)


@torch.no_grad()
def unshard(flat_bucket: FlatBucket, shares: Tensor) -> None:
    """Allocates and fills parameters whose storage was freed."""
    for parameter in flat_bucket.parameters:
        allocate_storage(parameter)
    flat_bucket.part(shares, [parameter.data for parameter in flat_bucket.parameters])
