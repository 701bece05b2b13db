"""The collectives of gridformer: every message of the library is sent by this package.

They work on plain tensors without gradients; `gridformer.comm.autograd` adds gradients. On an axis
of size 1 each function returns its input. `label` names the purpose of a message in counts and
traces. `start_...` is the asynchronous form of a collective: it returns a `Pending` to wait for.
`root` and other ranks are given as indices along the axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gridformer.comm import progress
from gridformer.comm.recorder import Noted, Targets, note
from gridformer.mesh import groups
from gridformer.mesh.axes import Axis
from gridformer.utils.tensors import free_storage

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
# torch 2.13 renamed the two single-tensor collectives; 2.11 has only the old names.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


class Pending:
    """A collective that was started. `wait()` returns its result and may be called repeatedly.

    A `Pending` keeps references to the tensors of the message until `wait()` returns. On a GPU
    `wait()` makes the current stream wait, not the host. All ranks of an axis must start their
    collectives in the same order.

    Args:
        result: The tensor that holds the result when the message is done.
        work: Torch's handle of the message; None if it is done already.
        held: Objects to keep alive until `wait()`.
    """

    def __init__(self, result: Tensor, work: Any = None, *held: Any) -> None:
        self._result, self._work, self._held = result, work, held
        self._steps: list[Callable[[Tensor], Tensor]] = []
        self._meanwhile: Callable[[], None] | None = None
        self._timing: Noted = None
        self._own: Sequence[Tensor] = ()

    def meanwhile(self, task: Callable[[], None]) -> Pending:
        """Lets `wait` run `task` before it waits for the message. Returns self."""
        self._meanwhile = task
        return self

    def timed(self, timing: Noted) -> Pending:
        """Lets `wait` note in `timing` when it begins to wait and when the message is done."""
        self._timing = timing
        if timing is not None:
            timing.started()
        return self

    def own(self, *buffers: Tensor) -> Pending:
        """Lets `wait` free the memory of buffers that belong to this message alone.

        A buffer whose memory the result shares is kept. Dropping references would not be enough,
        because a thread of gloo may hold the tensors longer than the caller.
        """
        self._own = buffers
        return self

    def then(self, step: Callable[[Tensor], Tensor]) -> Pending:
        """Lets `wait` apply `step` to the result. Returns self."""
        self._steps.append(step)
        return self

    def wait(self) -> Tensor:
        """Waits for the message and returns its result, to which the steps have been applied."""
        if self._meanwhile is not None:
            self._meanwhile()
            self._meanwhile = None
        timing, self._timing = self._timing, None
        if self._work is not None:
            if timing is not None:
                timing.wait()
            self._work.wait()
            self._work = None
        if timing is not None:
            timing.end()
        self._held = ()
        steps, self._steps = self._steps, []
        for step in steps:
            self._result = step(self._result)
        own, self._own = self._own, ()
        for buffer in own:
            if not _share_memory(buffer, self._result):
                free_storage(buffer)
        return self._result


def all_reduce(x: Tensor, axis: Axis, op: str = "sum", label: str = "") -> Tensor:
    """Combines x of all ranks by `op`: "sum", "max" or "min".

    Args:
        x: Tensor of any shape. It is overwritten if it is contiguous.
        axis: The ranks that take part.
        op: "sum", "max" or "min", element by element.
        label: The purpose under which a recorder counts the message.

    Returns:
        The result: x itself, or a new tensor if x was not contiguous.
    """
    return _start_all_reduce(x, axis, op, label, later=False).wait()


def start_all_reduce(x: Tensor, axis: Axis, op: str = "sum", label: str = "") -> Pending:
    """Starts `all_reduce` and returns without waiting for it.

    Args:
        x: Tensor of any shape. It is overwritten if it is contiguous.
        axis: The ranks that take part.
        op: "sum", "max" or "min", element by element.
        label: The purpose under which a recorder counts the message.

    Returns:
        The message, whose `wait` returns what `all_reduce` returns.
    """
    return _start_all_reduce(x, axis, op, label, later=True)


def broadcast(x: Tensor, axis: Axis, root: int, label: str = "") -> Tensor:
    """Copies x of `root` into x of every other rank.

    Args:
        x: Tensor of the same shape on all ranks, contiguous. It is overwritten except on `root`.
        axis: The ranks that take part.
        root: The index on the axis of the rank that sends.
        label: The purpose under which a recorder counts the message.

    Returns:
        x itself.
    """
    return _start_broadcast(x, axis, root, label, later=False).wait()


def start_broadcast(x: Tensor, axis: Axis, root: int, label: str = "") -> Pending:
    """Starts `broadcast` and returns without waiting for it.

    Args:
        x: Tensor of the same shape on all ranks, contiguous. It is overwritten except on `root`.
        axis: The ranks that take part.
        root: The index on the axis of the rank that sends.
        label: The purpose under which a recorder counts the message.

    Returns:
        The message, whose `wait` returns what `broadcast` returns.
    """
    return _start_broadcast(x, axis, root, label, later=True)


def reduce(x: Tensor, axis: Axis, root: int, label: str = "") -> Tensor:
    """Sums x of all ranks in place on `root`. On other ranks the content of x is then undefined.

    Args:
        x: Tensor of the same shape on all ranks, contiguous. It is overwritten.
        axis: The ranks that take part.
        root: The index on the axis of the rank that gets the sum.
        label: The purpose under which a recorder counts the message.

    Returns:
        x itself.
    """
    return _start_reduce(x, axis, root, label, later=False).wait()


def start_reduce(x: Tensor, axis: Axis, root: int, label: str = "") -> Pending:
    """Starts `reduce` and returns without waiting for it.

    Args:
        x: Tensor of the same shape on all ranks, contiguous. It is overwritten.
        axis: The ranks that take part.
        root: The index on the axis of the rank that gets the sum.
        label: The purpose under which a recorder counts the message.

    Returns:
        The message, whose `wait` returns what `reduce` returns.
    """
    return _start_reduce(x, axis, root, label, later=True)


def all_gather(x: Tensor, axis: Axis, dim: int, label: str = "") -> Tensor:
    """Concatenates x of all ranks along a dimension, in the order of the axis.

    Args:
        x: [.., k, ..], k along `dim`, of the same shape on all ranks; it is not modified.
        axis: The ranks that take part.
        dim: The dimension.
        label: The purpose under which a recorder counts the message.

    Returns:
        A new tensor [.., size*k, ..], or x itself on an axis of one rank.
    """
    return _start_all_gather(x, axis, dim, label, later=False).wait()


def start_all_gather(x: Tensor, axis: Axis, dim: int, label: str = "") -> Pending:
    """Starts `all_gather` and returns without waiting for it.

    Args:
        x: [.., k, ..], k along `dim`, of the same shape on all ranks; it is not modified.
        axis: The ranks that take part.
        dim: The dimension along which blocks are concatenated.
        label: The purpose under which a recorder counts the message.

    Returns:
        The message, whose `wait` returns what `all_gather` returns.
    """
    return _start_all_gather(x, axis, dim, label, later=True)


def reduce_scatter(x: Tensor, axis: Axis, dim: int, label: str = "") -> Tensor:
    """Sums x of all ranks and returns this rank's block of the sum along `dim`.

    Args:
        x: [.., size*k, ..], size*k along `dim`; it is not modified.
        axis: The ranks that take part.
        dim: The dimension of the blocks.
        label: The purpose under which a recorder counts the message.

    Returns:
        A new tensor [.., k, ..], or x itself on an axis of one rank.

    Raises:
        ValueError: The size of `dim` is not a multiple of the axis size.
    """
    return _start_reduce_scatter(x, axis, dim, label, later=False).wait()


def start_reduce_scatter(x: Tensor, axis: Axis, dim: int, label: str = "") -> Pending:
    """Starts `reduce_scatter` and returns without waiting for it.

    Args:
        x: [.., size*k, ..], size*k along `dim`; it is not modified.
        axis: The ranks that take part.
        dim: The dimension of the blocks.
        label: The purpose under which a recorder counts the message.

    Returns:
        The message, whose `wait` returns what `reduce_scatter` returns.

    Raises:
        ValueError: The size of `dim` is not a multiple of the axis size.
    """
    return _start_reduce_scatter(x, axis, dim, label, later=True)


def start_sum_of_parts(part: Callable[[int], Tensor], axis: Axis, label: str = "") -> Pending:
    """Starts a reduce-scatter whose blocks are computed one at a time.

    Over gloo this rank's own block is computed last, while the others are being sent, so it never
    exists at the same time as all of them.

    Args:
        part: Returns the block for the rank with a given index; all blocks have the same shape.

    Returns:
        A Pending of the sum of all ranks' `part(axis.index)`.
    """
    if axis.size == 1:
        return Pending(part(0))
    others = [part(index) for index in range(axis.size) if index != axis.index]
    one = others[0]
    timing = _note("reduce_scatter", axis, (axis.size - 1) * one.numel(), one, label, n=axis.size)
    if groups.over_nccl(axis.group):
        terms = torch.stack(_around(others, part(axis.index), axis)).contiguous()
        return _reduce_scatter_blocks(terms, axis, later=True).timed(timing)
    del one
    pending = _exchange(others, axis, later=True)
    del others
    mine: list[Tensor] = []
    pending.meanwhile(lambda: mine.append(part(axis.index)))
    return pending.timed(timing).then(lambda rest: _sum(rest, mine.pop()))


def barrier(axes: tuple[Axis, ...]) -> None:
    """Returns when every rank of every given axis has called this function."""
    for axis in axes:
        if axis.size > 1:
            watched = progress.active
            noted = watched and watched.posted("barrier", axis, "", -1, -1, None)
            dist.barrier(group=axis.group)
            if noted:
                noted.end()


# --------------------------------------------------------------------------- implementations


def _start_all_reduce(x: Tensor, axis: Axis, op: str, label: str, later: bool) -> Pending:
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    timing = _note("all_reduce", axis, 2 * _share(axis) * x.numel(), x, label)
    work = dist.all_reduce(x, op=_OPS[op], group=axis.group, async_op=later)
    return Pending(x, work).timed(timing)


def _start_broadcast(x: Tensor, axis: Axis, root: int, label: str, later: bool) -> Pending:
    if axis.size == 1:
        return Pending(x)
    at_root = axis.index == root
    moved = 0 if at_root else x.numel()
    timing = _note("broadcast", axis, moved, x, label, "all" if at_root else ())
    # Over gloo a GPU tensor is copied back from the host even on the root. Autograd may have saved
    # the root's tensor for a backward pass and must not consider that a change, and `data` has its
    # own version counter.
    sent = x.data if axis.index == root else x
    work = dist.broadcast(sent, group_src=root, group=axis.group, async_op=later)
    return Pending(x, work).timed(timing)


def _start_reduce(x: Tensor, axis: Axis, root: int, label: str, later: bool) -> Pending:
    if axis.size == 1:
        return Pending(x)
    timing = _note("reduce", axis, 0 if axis.index == root else x.numel(), x, label, (root,))
    work = dist.reduce(x, group_dst=root, group=axis.group, async_op=later)
    return Pending(x, work).timed(timing)


def _start_all_gather(x: Tensor, axis: Axis, dim: int, label: str, later: bool) -> Pending:
    if axis.size == 1:
        return Pending(x)
    dim %= x.dim()
    x = x.contiguous()
    timing = _note("all_gather", axis, (axis.size - 1) * x.numel(), x, label)
    if groups.over_nccl(axis.group):
        blocks = x.new_empty((axis.size, *x.shape))
        work = _all_gather(blocks.view(-1), x.view(-1), group=axis.group, async_op=later)
        pending = Pending(blocks, work, x).timed(timing)
        return pending.then(lambda parts: parts.movedim(0, dim).flatten(dim, dim + 1))
    pending = _exchange([x] * (axis.size - 1), axis, later).timed(timing)
    return pending.then(lambda rest: concatenated(rest, x, axis, dim))


def _start_reduce_scatter(x: Tensor, axis: Axis, dim: int, label: str, later: bool) -> Pending:
    if axis.size == 1:
        return Pending(x)
    dim %= x.dim()
    if x.shape[dim] % axis.size:
        raise ValueError(
            f"cannot reduce-scatter {tuple(x.shape)} along dim {dim}: {x.shape[dim]} does not "
            f"divide over {axis.name}={axis.size}"
        )
    timing = _note("reduce_scatter", axis, _share(axis) * x.numel(), x, label)
    blocks = x.unflatten(dim, (axis.size, -1)).movedim(dim, 0)
    if groups.over_nccl(axis.group):
        return _reduce_scatter_blocks(blocks.contiguous(), axis, later).timed(timing)
    mine, others = blocks[axis.index], without(blocks, axis.index)
    return _exchange(others, axis, later).timed(timing).then(lambda rest: _sum(rest, mine))


def _reduce_scatter_blocks(blocks: Tensor, axis: Axis, later: bool) -> Pending:
    """Reduce-scatters contiguous blocks [size, *block] to this rank's sum [*block]."""
    # Not empty_like of a block as it was before stacking: that keeps the strides of a transposed
    # block, and `view(-1)` then fails. `blocks` are contiguous, and so is `out`.
    out = blocks.new_empty(blocks.shape[1:])
    work = _reduce_scatter(out.view(-1), blocks.view(-1), group=axis.group, async_op=later)
    return Pending(out, work, blocks)


def _exchange(blocks: list[Tensor], axis: Axis, later: bool) -> Pending:
    """Sends a block to each other rank and receives one from each: [size-1, *block] in rank order.

    Empties the list of blocks. gloo's own all-gather takes 1.5 times as much processor time, its
    reduce-scatter sends twice the minimum, and neither leaves out the block that stays on its rank.
    """
    n, one = len(blocks), blocks[0]
    # `reshape` alone would give a view with gaps if a column of a wider matrix is sent.
    sent = (one if n == 1 else stacked(blocks)).contiguous().view(-1)
    shape, copied = one.shape, () if _share_memory(sent, one) else (sent,)
    del one
    blocks.clear()
    received = sent.new_empty((n, *shape))
    sizes = [shape.numel()] * axis.size
    sizes[axis.index] = 0
    work = dist.all_to_all_single(
        received.view(-1), sent, sizes, sizes, group=axis.group, async_op=later
    )
    return Pending(received, work, sent).own(received, *copied)


# Helpers for the blocks of a tensor before and after messages: `without` leaves one block out,
# `stacked` copies all blocks into one tensor, and `concatenated` joins the received blocks and this
# device's own.


def without(blocks: Tensor, index: int) -> list[Tensor]:
    """Returns all blocks [n, *block] but one."""
    return [block for number, block in enumerate(blocks) if number != index]


def stacked(blocks: list[Tensor]) -> Tensor:
    """Returns blocks as one new tensor [n, *block]."""
    return torch.stack(blocks)


def concatenated(rest: Tensor, mine: Tensor, axis: Axis, dim: int) -> Tensor:
    """Returns the blocks of all ranks as one new tensor, along a dimension of the blocks.

    Args:
        rest: The blocks of the other ranks [n - 1, *block].
        mine: This rank's block.
        axis: The axis of the ranks.
        dim: The dimension of a block along which they are joined.
    """
    return torch.cat(_around(rest, mine, axis), dim)


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _around(rest: Sequence[Tensor] | Tensor, mine: Tensor, axis: Axis) -> list[Tensor]:
    """Inserts this rank's block among those of the other ranks."""
    return [*rest[: axis.index], mine, *rest[axis.index :]]


def _sum(rest: Tensor, mine: Tensor) -> Tensor:
    total = rest[0] if len(rest) == 1 else rest.sum(0)
    return total.add_(mine)


def _share(axis: Axis) -> float:
    """The fraction of a tensor that other ranks hold."""
    return (axis.size - 1) / axis.size


def _note(
    op: str, axis: Axis, moved: float, x: Tensor, label: str, targets: Targets = "all", n: int = 1
) -> Noted:
    """Notes a message of n tensors like x."""
    return note(op, axis, moved, x.element_size(), label, targets, n * x.numel())
