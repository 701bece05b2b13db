"""Collectives with gradients, in pairs: the backward of one is the forward of the other.

A tensor that is replicated over an axis counts as one variable, so the sum over an axis and the
copy to its ranks are each other's transposes. Names have the form `forward_backward`. Sections of a
network are entered and left through such pairs. Every pair returns x itself on an axis of size
1, and `label` names its messages in counts and traces, in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def version_of(x: Tensor) -> int | None:
    """Returns how often x was changed in place; None for a tensor of inference mode."""
    return None if x.is_inference() else x._version


def allreduce_identity(x: Tensor, axis: Axis) -> Tensor:
    """Forward all-reduce of partial sums, backward identity: g of Megatron-LM.

    The sum is a new tensor, replicated over the axis.
    """
    return pair(x, axis, lambda x: _sum(x, axis), lambda grad: grad)


def allreduce_allreduce(x: Tensor, axis: Axis) -> Tensor:
    """Forward all-reduce of partial sums, backward all-reduce, for a result that differs in use.

    Each rank's gradient is a part of that of the sum, as if one rank alone computed with it.
    """
    return pair(x, axis, lambda x: _sum(x, axis), lambda grad: _sum(grad, axis))


class StartedGather:
    """Forward all-gather on dimension 0 until `wait`, backward reduce-scatter of the gradient.

    The gradient is sent as soon as it is there, and received when that of x is needed. Gathers that
    are started together and waited for one after the other thus travel while the rest of the
    network computes, both ways.

    Args:
        x: This rank's part [k, ..].
        order: Which of the equal blocks of the gathered tensor the blocks of the result are.
    """

    def __init__(self, x: Tensor, axis: Axis, label: str, order: Sequence[int]) -> None:
        self._messages = _Messages(axis, label, order)
        self._place: Tensor = _StartGather.apply(x, self._messages)

    def wait(self) -> Tensor:
        """Returns the gathered tensor [size*k, ..]."""
        out: Tensor = _WaitForGather.apply(self._place, self._messages)
        for listener in listeners:
            listener(self._place)
            listener(out)
        return out


class _Messages:
    """The messages of a `StartedGather`, in both directions."""

    def __init__(self, axis: Axis, label: str, order: Sequence[int]) -> None:
        self.axis, self.label, self.order = axis, label, order
        self.pending: comm.Pending | None = None

    def wait(self) -> Tensor:
        pending, self.pending = self.pending, None
        assert pending is not None
        return pending.wait()


class _StartGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, messages: _Messages) -> Tensor:
        ctx.messages = messages
        messages.pending = comm.start_all_gather(x, messages.axis, 0, messages.label)
        # A placeholder, which holds one element.
        return x.new_empty(()).expand(messages.axis.size * x.shape[0], *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.messages.wait(), None


class _WaitForGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, place: Tensor, messages: _Messages) -> Tensor:
        ctx.messages = messages
        blocks = messages.wait().chunk(len(messages.order))
        return torch.cat([blocks[i] for i in messages.order])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        messages, grad = ctx.messages, grads[0]
        blocks, n = grad.chunk(len(messages.order)), len(messages.order)
        places = sorted(range(n), key=messages.order.__getitem__)
        sent = torch.cat([blocks[i] for i in places])
        messages.pending = comm.start_reduce_scatter(sent, messages.axis, 0, messages.label)
        return grad.new_empty(()).expand(grad.shape), None


def alltoall(x: Tensor, axis: Axis, split_dim: int, join_dim: int, label: str) -> Tensor:
    """Forward all-to-all, backward all-to-all with the two dimensions swapped.

    Part i of x along `split_dim`, a multiple of the axis size, goes to rank i, and the parts
    received from all ranks are concatenated along `join_dim`.
    """
    return pair(
        x,
        axis,
        lambda x: _swap(x, axis, split_dim, join_dim, label),
        lambda grad: _swap(grad, axis, join_dim, split_dim, label),
    )


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
    return pair(
        x,
        axis,
        lambda x: _scatter(x, axis, dim, device, label),
        lambda grad: _gather(grad, axis, dim, label),
    )


def gather_scatter(x: Tensor, axis: Axis, dim: int, label: str = "leave") -> Tensor:
    """Forward gather of parts [.., k, ..] along `dim` to index 0, backward scatter from it.

    On ranks other than index 0 the whole tensor [.., size*k, ..] is on the meta device.
    """
    device = x.device
    return pair(
        x,
        axis,
        lambda x: _gather(x, axis, dim, label),
        lambda grad: _scatter(grad, axis, dim, device, label),
    )


class _Pair(torch.autograd.Function):
    """Applies one function to x, and another to the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        forward: Callable[[Tensor], Tensor],
        backward: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.of_gradient = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.of_gradient(grads[0]), None, None


def pair(
    x: Tensor,
    axis: Axis,
    forward: Callable[[Tensor], Tensor],
    backward: Callable[[Tensor], Tensor],
) -> Tensor:
    """Returns a function of x whose gradient is another function of that of the result."""
    if axis.size == 1:
        return x
    out: Tensor = _Pair.apply(x, forward, backward)
    for listener in listeners:
        listener(out)
    return out


def _sum(x: Tensor, axis: Axis) -> Tensor:
    return comm.all_reduce(x.clone(), axis, label="leave")


def _swap(x: Tensor, axis: Axis, split_dim: int, join_dim: int, label: str) -> Tensor:
    parts = x.chunk(axis.size, split_dim)
    shapes = [parts[0].shape] * axis.size
    return torch.cat(irregular.all_to_all(parts, shapes, axis, label), join_dim)


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
