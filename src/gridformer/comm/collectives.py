"""The one door: every collective that gridformer issues is one of these functions.

They work on plain tensors and know nothing of gradients; `gridformer.comm.autograd` pairs them.
On an axis of size 1 each returns its input. `label` names the purpose in counts and traces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gridformer.comm.axis import Axis
from gridformer.comm.recorder import note

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
# torch 2.13 renames the two single-tensor collectives; 2.11 has only the old names.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def all_reduce(x: Tensor, axis: Axis, op: str = "sum", label: str = "") -> Tensor:
    """In place: every rank's x combined. Returns x, made contiguous if it was not."""
    if axis.size == 1:
        return x
    x = x.contiguous()
    _note("all_reduce", axis, 2 * _share(axis) * x.numel(), x, label)
    dist.all_reduce(x, op=_OPS[op], group=axis.group)
    return x


def broadcast(x: Tensor, axis: Axis, root: int, label: str = "") -> Tensor:
    """In place: x of the rank with index `root`. x must be contiguous."""
    if axis.size == 1:
        return x
    _note("broadcast", axis, 0 if axis.index == root else x.numel(), x, label)
    dist.broadcast(x, group_src=root, group=axis.group)
    return x


def reduce(x: Tensor, axis: Axis, root: int, label: str = "") -> Tensor:
    """In place: on `root` the sum of every rank's x; elsewhere x's content is undefined after."""
    if axis.size == 1:
        return x
    _note("reduce", axis, 0 if axis.index == root else x.numel(), x, label)
    dist.reduce(x, group_dst=root, group=axis.group)
    return x


def all_gather(x: Tensor, axis: Axis, dim: int, label: str = "") -> Tensor:
    """The ranks' blocks joined along `dim`: [.., k, ..] to [.., size*k, ..]."""
    if axis.size == 1:
        return x
    front = x.movedim(dim, 0).contiguous()
    out = front.new_empty((axis.size * front.shape[0], *front.shape[1:]))
    _note("all_gather", axis, _share(axis) * out.numel(), x, label)
    _all_gather(out, front, group=axis.group)
    return out.movedim(0, dim)


def reduce_scatter(x: Tensor, axis: Axis, dim: int, label: str = "") -> Tensor:
    """The sum of every rank's x, of which this rank keeps its block along `dim`.

    Raises ValueError when x's `dim` does not divide over the axis.
    """
    if axis.size == 1:
        return x
    if x.shape[dim] % axis.size:
        raise ValueError(f"{x.shape[dim]} does not divide over {axis.name}={axis.size}")
    front = x.movedim(dim, 0).contiguous()
    _note("reduce_scatter", axis, _share(axis) * front.numel(), x, label)
    if front.device.type == "cpu":
        # gloo's own reduce-scatter sends twice the minimum; an exchange and a local sum do not.
        parts = torch.empty_like(front)
        dist.all_to_all_single(parts, front, group=axis.group)
        out = parts.view(axis.size, -1, *front.shape[1:]).sum(0)
    else:
        scatter: Callable[..., Any] = getattr(
            dist, "reduce_scatter_single", dist.reduce_scatter_tensor
        )
        out = front.new_empty((front.shape[0] // axis.size, *front.shape[1:]))
        scatter(out, front, group=axis.group)
    return out.movedim(0, dim)


def barrier(axes: tuple[Axis, ...]) -> None:
    """Return when every rank of every given axis has come here."""
    for axis in axes:
        if axis.size > 1:
            dist.barrier(group=axis.group)


def _share(axis: Axis) -> float:
    return (axis.size - 1) / axis.size


def _note(op: str, axis: Axis, moved: float, x: Tensor, label: str) -> None:
    note(op, axis.name, axis.size, moved, x.element_size(), label)
