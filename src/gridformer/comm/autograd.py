"""Conjugate pairs of collectives: what one does forward, its partner does backward.

A tensor that every rank of an axis holds alike counts as one variable, so the sum over an axis and
the copy to it are each other's transposes. Names say `forward_backward`. Sections of a network are
entered and left through such pairs (specification, section 5).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from gridformer.comm import collectives as comm
from gridformer.comm import irregular as pieces
from gridformer.mesh.axes import Axis


def one_thread() -> AbstractContextManager[object]:
    """Around a backward pass that communicates: all of it is done by the calling thread.

    Otherwise torch goes back through a GPU's tensors in one thread and through those on the meta
    device (what another device holds, in D&SP-cSub) in another, and the order in which this rank
    enters its collectives is left to chance.
    """
    return torch.autograd.set_multithreading_enabled(False)


def identity_allreduce(x: Tensor, axis: Axis, label: str = "enter") -> Tensor:
    """Megatron's f: forward nothing, backward all-reduce. Replicated in, replicated out."""
    return x if axis.size == 1 else _IdentityAllReduce.apply(x, axis, label)


def allreduce_identity(x: Tensor, axis: Axis, label: str = "leave") -> Tensor:
    """Megatron's g: forward all-reduce of partial sums, backward nothing."""
    return x if axis.size == 1 else _AllReduceIdentity.apply(x, axis, label)


def allgather_reducescatter(x: Tensor, axis: Axis, dim: int, label: str = "enter") -> Tensor:
    """Forward all-gather along `dim`, backward reduce-scatter: cut in, whole out."""
    return x if axis.size == 1 else _AllGatherReduceScatter.apply(x, axis, dim, label)


def reducescatter_allgather(x: Tensor, axis: Axis, dim: int, label: str = "leave") -> Tensor:
    """Forward reduce-scatter of partial sums along `dim`, backward all-gather."""
    return x if axis.size == 1 else _ReduceScatterAllGather.apply(x, axis, dim, label)


def broadcast_reduce(x: Tensor, axis: Axis, root: int, label: str = "enter") -> Tensor:
    """Forward broadcast from `root`, backward reduce to it; elsewhere x only gives the shape."""
    return x if axis.size == 1 else _BroadcastReduce.apply(x, axis, root, label)


def reduce_broadcast(x: Tensor, axis: Axis, root: int, label: str = "leave") -> Tensor:
    """Forward reduce of partial sums to `root` (zeros elsewhere), backward broadcast from it."""
    return x if axis.size == 1 else _ReduceBroadcast.apply(x, axis, root, label)


def alltoall(x: Tensor, axis: Axis, split_dim: int, join_dim: int, label: str) -> Tensor:
    """Forward and backward all-to-all: part i of x along `split_dim` goes to rank i, and what comes
    from the ranks is joined along `join_dim`. Backward the two dimensions change places."""
    return x if axis.size == 1 else _AllToAll.apply(x, axis, split_dim, join_dim, label)


def scatter_gather(
    x: Tensor, axis: Axis, dim: int, device: torch.device, label: str = "enter"
) -> Tensor:
    """Forward part i along `dim` of rank 0's x to rank i, backward gather. Elsewhere x is on the
    meta device and gives the shape; the part comes to `device`."""
    return x if axis.size == 1 else _ScatterGather.apply(x, axis, dim, device, label)


def gather_scatter(x: Tensor, axis: Axis, dim: int, label: str = "leave") -> Tensor:
    """Forward the ranks' parts joined along `dim` on rank 0 (on the meta device elsewhere),
    backward scatter."""
    return x if axis.size == 1 else _GatherScatter.apply(x, axis, dim, label)


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
    return torch.cat(pieces.all_to_all(parts, [parts[0].shape] * axis.size, axis, label), join_dim)


def _scatter(x: Tensor, axis: Axis, dim: int, device: torch.device, label: str) -> Tensor:
    parts = x.chunk(axis.size, dim)
    out = torch.empty(parts[0].shape, dtype=x.dtype, device=device)
    return pieces.scatter(parts, out, axis, 0, label)


def _gather(x: Tensor, axis: Axis, dim: int, label: str) -> Tensor:
    parts = pieces.gather(x, [x.shape] * axis.size, axis, 0, label)
    if parts is not None:
        return torch.cat(parts, dim)
    shape = list(x.shape)
    shape[dim] *= axis.size
    return x.new_empty(shape, device="meta")


def _on_root(x: Tensor, axis: Axis, root: int) -> Tensor:
    return x if axis.index == root else torch.zeros_like(x)
