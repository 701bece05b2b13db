"""How replicas share out what all of them would hold alike: parts of parameters, by rows.

    dp_mode      parameters    gradients        optimizer state    source
    replicate    whole         whole            whole              -
    zero1        whole         parts, summed    parts              ZeRO-1, Rajbhandari et al. 2020
    fsdp         parts         parts, summed    parts              ZeRO-3, FSDP, Zhao et al. 2023

Every parameter is cut, vectors too, so a device holds 1/d of the state, rounded up to a row of each
tensor. A part is some rows of the local block, in the order in which it lies in memory (columns of
one that is stored transposed): contiguous there, and a rectangle of the global tensor, which
checkpoints store as any other block. All replicas have equally many rows but the last ones, which
may have fewer, or none.

With several micro-batches gradients are summed up whole, on every device, and travel once a step:
until the last backward pass ends a device holds the gradients of all that it computes with, under
fsdp too. One micro-batch keeps only what two messages of gradients hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from gridformer.mesh import Axes, Axis
from gridformer.parallel.sharding import ParamInfo, info_of, set_info, shard_of

Mode = Literal["replicate", "zero1", "fsdp"]


def cut_over_replicas(parameter: nn.Parameter, axes: Axes, mode: Mode) -> None:
    """Give a filled parameter its part; under fsdp let go of the rest.

    Under zero1 copies that are not their owners have none: nothing is updated of them.
    """
    info = info_of(parameter)
    shard = info.shard
    axis = axes[shard.replicas] if shard.replicas else Axis("none")
    if mode == "replicate" or axis.size == 1 or (mode == "zero1" and not shard.owned):
        return
    dim = 1 if shard.transposed else 0
    rows = parameter.shape[dim]
    each = -(-rows // axis.size)
    start = min(rows, axis.index * each)
    rows_here = parameter.data.narrow(dim, start, min(each, rows - start))
    offset = list(shard.offset)
    offset[dim] += start
    part = nn.Parameter(rows_here.clone() if mode == "fsdp" else rows_here)
    set_info(part, ParamInfo(replace(shard, offset=tuple(offset), replicas=None), info.init))
    set_info(parameter, replace(info, replica_part=part, resharded=mode == "fsdp"))
    if mode == "fsdp":
        free_storage(parameter)


def replica_part(parameter: nn.Parameter) -> nn.Parameter | None:
    """The rows of a parameter that this replica updates; None where all replicas update all."""
    return info_of(parameter).replica_part


def stored(parameter: nn.Parameter) -> nn.Parameter:
    """What lies in memory between steps: a replica's part under fsdp, else the parameter itself."""
    info = info_of(parameter)
    return info.replica_part if info.resharded and info.replica_part is not None else parameter


def free_storage(parameter: nn.Parameter) -> None:
    """Free a parameter's memory. The tensor and views of it that autograd has saved stay, and are
    valid again after `allocate_storage` and filling."""
    parameter.untyped_storage().resize_(0)


def allocate_storage(parameter: nn.Parameter) -> None:
    """Allocate memory of undefined content for a parameter whose storage was freed."""
    parameter.untyped_storage().resize_(parameter.numel() * parameter.element_size())


class FlatBucket:
    """Several parameters in one message, in which every replica has an equal share: its parts.

    What is missing of the last replicas' rows is filled with zeros.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], axis: Axis) -> None:
        self.parameters, self.axis = list(parameters), axis
        self._shapes = [_shape_in_rows(p) for p in self.parameters]
        self._each = [-(-rows // axis.size) for rows, _ in self._shapes]
        sizes = [each * width for each, (_, width) in zip(self._each, self._shapes)]
        self._starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.share = sum(sizes)  # elements of one replica

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Whole tensors, one for each parameter and laid out like it: [replicas, share]."""
        flat = tensors[0].new_zeros(self.axis.size, self.share)
        for there, here in self._places(flat, tensors):
            there.copy_(here)
        return flat

    def part(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        """The reverse of `join`, into tensors that are whole."""
        for there, here in self._places(flat, tensors):
            here.copy_(there)

    def join_parts(self) -> Tensor:
        """What this replica has of the parameters: [share]."""
        parts = [self._part(parameter) for parameter in self.parameters]
        flat = parts[0].new_zeros(self.share)
        for part, view in zip(parts, self.parts(flat)):
            view.copy_(part)
        return flat

    def parts(self, share: Tensor) -> list[Tensor]:
        """A share [share] as parts of the parameters, each laid out like its parameter (views)."""
        found = []
        for i, parameter in enumerate(self.parameters):
            (_, width), start = self._shapes[i], self._starts[i]
            part = self._part(parameter)
            rows = share[start : start + part.numel()]
            if part.dim() == 1:
                found.append(rows)
            else:
                rows = rows.view(-1, width)
                found.append(rows.t() if shard_of(parameter).transposed else rows)
        return found

    def _places(self, flat: Tensor, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Where rows lie in the message, and where in the tensors."""
        for i, (parameter, tensor) in enumerate(zip(self.parameters, tensors)):
            (n, width), each, start = self._shapes[i], self._each[i], self._starts[i]
            rows = _rows_of(tensor, parameter)
            full, rest = divmod(n, each)
            in_full = flat[:full, start : start + each * width].unflatten(1, (each, width))
            yield in_full, rows[: full * each].unflatten(0, (full, each))
            if rest:
                last = flat[full, start : start + rest * width]
                yield last.view(rest, width), rows[full * each :]

    @staticmethod
    def _part(parameter: nn.Parameter) -> Tensor:
        part = replica_part(parameter)
        assert part is not None, "only what is cut over replicas travels in flat buckets"
        return part.data


def _shape_in_rows(parameter: nn.Parameter) -> tuple[int, int]:
    """Rows that are cut over replicas, and elements of one. The parameter may have no memory."""
    if parameter.dim() == 1:
        return len(parameter), 1
    rows, width = parameter.shape
    return (width, rows) if shard_of(parameter).transposed else (rows, width)


def _rows_of(tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    """A tensor laid out like a parameter, as a matrix (a view) whose rows are cut over replicas."""
    tensor = tensor.detach()
    if tensor.dim() == 1:
        return tensor.unsqueeze(1)
    return tensor.t() if shard_of(parameter).transposed else tensor


@torch.no_grad()
def unshard(flat_bucket: FlatBucket, everything: Tensor) -> None:
    """Allocate and fill parameters whose storage was freed, from all shares [replicas, share]."""
    for parameter in flat_bucket.parameters:
        allocate_storage(parameter)
    flat_bucket.part(everything, [parameter.data for parameter in flat_bucket.parameters])
