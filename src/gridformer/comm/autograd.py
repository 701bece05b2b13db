"""Collectives with gradients, in pairs: the backward of one is the forward of the other.

A tensor that is replicated over an axis counts as one variable, so the sum over an axis and the
copy to its ranks are each other's transposes. Names have the form `forward_backward`. Sections of a
network are entered and left through such pairs. Every pair returns x itself on an axis of size
1, and `label` names its messages in counts and traces, in both directions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from gridformer.comm import collectives as comm
from gridformer.comm import irregular
from gridformer.mesh.axes import Axis

# Are told the result of each pair that is applied; a trace notes whose backward pass comes later.
listeners: list[Callable[[Tensor], object]] = []


def one_thread() -> AbstractContextManager[object]:
    """Returns a context in which the calling thread does all of a backward pass.

    It must surround a backward pass that communicates. Otherwise torch runs the backward pass of
    GPU tensors in one thread and that of tensors on the meta device (which stand for tensors of
    another device in D&SP-cSub) in another, and the order in which this rank enters its collectives
    is random.
    """
    return torch.autograd.set_multithreading_enabled(False)


def identity_allreduce(x: Tensor, axis: Axis, label: str = "enter") -> Tensor:
    """Forward identity, backward all-reduce: f of Megatron-LM (Shoeybi et al. 2019, figure 3).

    Args:
        x: Tensor of any shape, replicated over the axis.

    Returns:
        x. Its gradients on the ranks are partial sums, which the backward pass adds up.
    """
    return _apply(_IdentityAllReduce, x, axis, label)


def allreduce_identity(x: Tensor, axis: Axis, label: str = "leave") -> Tensor:
    """Forward all-reduce of partial sums, backward identity: g of Megatron-LM, the partner of f.

    Args:
        x: Partial sum of any shape.

    Returns:
        The sum over the axis, a new tensor of the same shape, replicated over the axis.
    """
    return _apply(_AllReduceIdentity, x, axis, label)


def allgather_reducescatter(x: Tensor, axis: Axis, dim: int, label: str = "enter") -> Tensor:
    """Forward all-gather along `dim`, backward reduce-scatter along `dim`.

    Args:
        x: This rank's shard [.., k, ..], k along `dim`.

    Returns:
        The whole tensor [.., size*k, ..]. Its gradients on the ranks are partial sums.
    """
    return _apply(_AllGatherReduceScatter, x, axis, dim, label)


def reducescatter_allgather(x: Tensor, axis: Axis, dim: int, label: str = "leave") -> Tensor:
    """Forward reduce-scatter of partial sums along `dim`, backward all-gather along `dim`.

    Args:
        x: Partial sum [.., size*k, ..], size*k along `dim`.

    Returns:
        This rank's shard [.., k, ..] of the sum.

    Raises:
        ValueError: The size of `dim` is not a multiple of the axis size.
    """
    return _apply(_ReduceScatterAllGather, x, axis, dim, label)


def broadcast_reduce(x: Tensor, axis: Axis, root: int, label: str = "enter") -> Tensor:
    """Forward broadcast from the rank with index `root`, backward reduce to it.

    Args:
        x: The tensor to send on `root`; on other ranks only its shape and type are used.

    Returns:
        x of `root`, as a new tensor. On other ranks the gradient of their own x is 0.
    """
    return _apply(_BroadcastReduce, x, axis, root, label)


def reduce_broadcast(x: Tensor, axis: Axis, root: int, label: str = "leave") -> Tensor:
    """Forward reduce of partial sums to the rank with index `root`, backward broadcast from it.

    Args:
        x: Partial sums, of the same shape on all ranks; it is not modified.
        axis: The ranks that take part.
        root: The index on the axis of the rank that gets the sum.
        label: The purpose under which a recorder counts the messages.

    Returns:
        The sum over the axis on `root`, and zeros of the same shape on other ranks.
    """
    return _apply(_ReduceBroadcast, x, axis, root, label)


def alltoall(x: Tensor, axis: Axis, split_dim: int, join_dim: int, label: str) -> Tensor:
    """Forward all-to-all, backward all-to-all with the two dimensions swapped.

    Part i of x along `split_dim` goes to rank i, and the parts received from all ranks are
    concatenated along `join_dim`.

    Args:
        x: Tensor whose size along `split_dim` is a multiple of the axis size.

    Returns:
        A tensor that is smaller than x by the axis size along `split_dim` and larger by it along
        `join_dim`.
    """
    return _apply(_AllToAll, x, axis, split_dim, join_dim, label)


def scatter_gather(
    x: Tensor, axis: Axis, dim: int, device: torch.device, label: str = "enter"
) -> Tensor:
    """Forward scatter from index 0 along `dim`, backward gather to it.

    Args:
        x: The whole tensor [.., size*k, ..] on the rank with index 0. On other ranks it is on the
            meta device and gives the shape.
        device: Device of the result.

    Returns:
        This rank's part [.., k, ..] of the tensor.
    """
    return _apply(_ScatterGather, x, axis, dim, device, label)


def gather_scatter(x: Tensor, axis: Axis, dim: int, label: str = "leave") -> Tensor:
    """Forward gather along `dim` to index 0, backward scatter from it.

    Args:
        x: This rank's part [.., k, ..].

    Returns:
        The whole tensor [.., size*k, ..] on the rank with index 0. On other ranks it is on the meta
        device.
    """
    return _apply(_GatherScatter, x, axis, dim, label)


def _apply(pair: type[torch.autograd.Function], x: Tensor, axis: Axis, *args: Any) -> Tensor:
    if axis.size == 1:
        return x
    out: Tensor = pair.apply(x, axis, *args)
    for listener in listeners:
        listener(out)
    return out


class _IdentityAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, label: str) -> Tensor:
        ctx.axis, ctx.label = axis, label
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return comm.all_reduce(grads[0].clone(), ctx.axis, label=ctx.label), None, None


class _AllReduceIdentity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, label: str) -> Tensor:
        return comm.all_reduce(x.clone(), axis, label=label)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None, None


class _AllGatherReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, label: str) -> Tensor:
        ctx.args = axis, dim, label
        return comm.all_gather(x, axis, dim, label)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        axis, dim, label = ctx.args
        return comm.reduce_scatter(grads[0], axis, dim, label), None, None, None


class _ReduceScatterAllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, label: str) -> Tensor:
        ctx.args = axis, dim, label
        return comm.reduce_scatter(x, axis, dim, label)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        axis, dim, label = ctx.args
        return comm.all_gather(grads[0], axis, dim, label), None, None, None


class _BroadcastReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, root: int, label: str) -> Tensor:
        ctx.args = axis, root, label
        return comm.broadcast(x.clone(memory_format=torch.contiguous_format), axis, root, label)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        axis, root, label = ctx.args
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        return _on_root(comm.reduce(grad, axis, root, label), axis, root), None, None, None


class _ReduceBroadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, root: int, label: str) -> Tensor:
        ctx.args = axis, root, label
        x = x.clone(memory_format=torch.contiguous_format)
        return _on_root(comm.reduce(x, axis, root, label), axis, root)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        axis, root, label = ctx.args
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        return comm.broadcast(grad, axis, root, label), None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: Axis, split_dim: int, join_dim: int, label: str
    ) -> Tensor:
        ctx.args = axis, split_dim, join_dim, label
        return _swap(x, axis, split_dim, join_dim, label)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        axis, split_dim, join_dim, label = ctx.args
        return _swap(grads[0], axis, join_dim, split_dim, label), None, None, None, None


class _ScatterGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: Axis, dim: int, device: torch.device, label: str
    ) -> Tensor:
        ctx.args = axis, dim, label
        return _scatter(x, axis, dim, device, label)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        axis, dim, label = ctx.args
        return _gather(grads[0], axis, dim, label), None, None, None, None


class _GatherScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, label: str) -> Tensor:
        ctx.args = axis, dim, x.device, label
        return _gather(x, axis, dim, label)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        axis, dim, device, label = ctx.args
        return _scatter(grads[0], axis, dim, device, label), None, None, None


def _swap(x: Tensor, axis: Axis, split_dim: int, join_dim: int, label: str) -> Tensor:
    parts = x.chunk(axis.size, split_dim)
    return torch.cat(
        irregular.all_to_all(parts, [parts[0].shape] * axis.size, axis, label), join_dim
    )


def _scatter(x: Tensor, axis: Axis, dim: int, device: torch.device, label: str) -> Tensor:
    parts = x.chunk(axis.size, dim)
    out = torch.empty(parts[0].shape, dtype=x.dtype, device=device)
    return irregular.scatter(parts, out, axis, 0, label)


def _gather(x: Tensor, axis: Axis, dim: int, label: str) -> Tensor:
    parts = irregular.gather(x, [x.shape] * axis.size, axis, 0, label)
    if parts is not None:
        return torch.cat(parts, dim)
    shape = list(x.shape)
    shape[dim] *= axis.size
    return x.new_empty(shape, device="meta")


def _on_root(x: Tensor, axis: Axis, root: int) -> Tensor:
    return x if axis.index == root else torch.zeros_like(x)
