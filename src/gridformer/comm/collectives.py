"""The collectives of gridformer: every message of the library is sent by this package.

They work on plain tensors without gradients; `gridformer.comm.autograd` adds gradients. On an axis
of size 1 each function returns its input. `label` names the purpose of a message in counts and
traces; `root` is an index along the axis. A function `start_...` returns a `Pending` to wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gridformer.comm import progress
from gridformer.comm.recorder import Noted, note, recorders
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
    """A message that was started. `wait()` returns its result and may be called repeatedly.

    It keeps references to the tensors of the message until `wait()` returns. On a GPU `wait()`
    makes the current stream wait, not the host. All ranks of an axis must start their collectives
    in the same order.

    Args:
        result: The tensor that holds the result when the message is done.
        work: The handle of the message, which has a method `wait`; None if it is done already.
        sent: A tensor to keep until then.
        finish: Makes the result of what was received, once.
    """

    def __init__(
        self,
        result: Tensor,
        work: Any = None,
        noted: Noted = None,
        sent: Tensor | None = None,
        finish: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._result, self._work, self._noted, self._sent = result, work, noted, sent
        self._finish = finish
        if noted is not None:
            noted.started()

    def wait(self) -> Tensor:
        """Waits for the message and returns its result."""
        noted, self._noted = self._noted, None
        if self._work is not None:
            if noted is not None:
                noted.wait()
            self._work.wait()
            self._work = None
        if noted is not None:
            noted.end()
        self._sent = None
        if self._finish is not None:
            self._result, self._finish = self._finish(self._result), None
        return self._result


class _Exchange(Pending):
    """Blocks from each other rank over gloo, which are joined or summed with this rank's own.

    gloo's own all-gather takes 1.5 times as much processor time, its reduce-scatter sends twice the
    minimum, and neither leaves out the block that stays on its rank. The memory of buffers is freed
    when the message is done: a thread of gloo may hold the tensors longer than the caller.

    Args:
        blocks: The blocks to send, in the order of the ranks. The list is emptied.
        own: This rank's own block; None if it is given later.
        dim: The dimension along which blocks are joined; None sums them.
        later: Whether the message may still be on its way when this returns.
        out: Where the result is written; None makes a tensor for it.
    """

    def __init__(
        self,
        blocks: list[Tensor],
        axis: Axis,
        noted: Noted,
        own: Tensor | None,
        dim: int | None = None,
        later: bool = True,
        out: Tensor | None = None,
    ) -> None:
        n, one = len(blocks), blocks[0]
        # `reshape` alone would give a view with gaps if a column of a wider matrix is sent.
        sent = (one if n == 1 else torch.stack(blocks)).contiguous().view(-1)
        self._copied = n > 1 or not one.is_contiguous()
        self._result, self._sent = sent.new_empty((n, *one.shape)), sent
        sizes = [one.numel()] * axis.size
        sizes[axis.index] = 0
        del one
        blocks.clear()
        self._work = dist.all_to_all_single(
            self._result.view(-1), sent, sizes, sizes, group=axis.group, async_op=later
        )
        self.own, self._index, self._dim, self._noted = own, axis.index, dim, noted
        self._out = out
        if noted is not None:
            noted.started()

    def wait(self) -> Tensor:
        own, self.own = self.own, None
        if own is None:
            return self._result
        noted, self._noted = self._noted, None
        if self._work is not None:
            if noted is not None:
                noted.wait()
            self._work.wait()
            self._work = None
        if noted is not None:
            noted.end()
        received, sent, at = self._result, self._sent, self._index
        self._sent = None
        out, self._out = self._out, None
        if self._dim is not None:
            blocks = [*received[:at], own, *received[at:]]
            self._result = torch.cat(blocks, self._dim, out=out)
        else:
            total = received[0] if len(received) == 1 else received.sum(0)
            self._result = total.add_(own) if out is None else torch.add(total, own, out=out)
        if self._dim is not None or len(received) > 1:
            free_storage(received)
        if self._copied and sent is not None:
            free_storage(sent)
        return self._result


class SumOfBlocks:
    """A reduce-scatter over gloo of blocks that are computed one by one, each rank's own one last.

    The blocks of others travel while the caller computes its own one. NCCL needs all of them at
    once, as `start_reduce_scatter` takes them. Call `add` once.
    """

    def __init__(self, others: list[Tensor], axis: Axis, label: str) -> None:
        assert not axis.over_nccl, "over NCCL all blocks are one message"
        noted = None
        if recorders or progress.active:
            moved = len(others) * others[0].numel()
            noted = note("reduce_scatter", axis, moved, others[0], label, n=axis.size)
        self._started = _Exchange(others, axis, noted, None)

    def add(self, own: Tensor) -> Pending:
        """Adds this rank's block, and returns the message of its sum over all ranks."""
        self._started.own = own
        return self._started


def all_reduce(x: Tensor, axis: Axis, op: str = "sum", label: str = "") -> Tensor:
    """Combines x of all ranks element by element by `op`: "sum", "max" or "min".

    The result is x itself, or a new tensor if x is not contiguous.
    """
    return start_all_reduce(x, axis, op, label, later=False).wait()


def start_all_reduce(
    x: Tensor, axis: Axis, op: str = "sum", label: str = "", later: bool = True
) -> Pending:
    """Starts `all_reduce`. With `later` false, as in all functions, the call itself waits."""
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    noted = (
        note("all_reduce", axis, 2 * (axis.size - 1) / axis.size * x.numel(), x, label)
        if recorders or progress.active
        else None
    )
    work = dist.all_reduce(x, op=_OPS[op], group=axis.group, async_op=later)
    return Pending(x, work, noted)


def broadcast(x: Tensor, axis: Axis, root: int, label: str = "") -> Tensor:
    """Copies x of `root` into x of every other rank.

    x has the same shape on all ranks and is contiguous. The result is x itself.
    """
    return start_broadcast(x, axis, root, label, later=False).wait()


def start_broadcast(
    x: Tensor, axis: Axis, root: int, label: str = "", later: bool = True
) -> Pending:
    """Starts `broadcast`."""
    if axis.size == 1:
        return Pending(x)
    at_root = axis.index == root
    moved = 0 if at_root else x.numel()
    noted = (
        note("broadcast", axis, moved, x, label, "all" if at_root else ())
        if recorders or progress.active
        else None
    )
    # Over gloo a GPU tensor is copied back from the host even on the root. Autograd may have saved
    # the root's tensor for a backward pass and must not consider that a change, and `data` has its
    # own version counter.
    sent = x.data if at_root else x
    work = dist.broadcast(sent, group_src=root, group=axis.group, async_op=later)
    return Pending(x, work, noted)


def reduce(x: Tensor, axis: Axis, root: int, label: str = "") -> Tensor:
    """Sums x of all ranks in place on `root`. On other ranks the content of x is then undefined.

    x has the same shape on all ranks and is contiguous. The result is x itself.
    """
    return start_reduce(x, axis, root, label, later=False).wait()


def start_reduce(x: Tensor, axis: Axis, root: int, label: str = "", later: bool = True) -> Pending:
    """Starts `reduce`."""
    if axis.size == 1:
        return Pending(x)
    noted = (
        note("reduce", axis, 0 if axis.index == root else x.numel(), x, label, (root,))
        if recorders or progress.active
        else None
    )
    work = dist.reduce(x, group_dst=root, group=axis.group, async_op=later)
    return Pending(x, work, noted)


def all_gather(x: Tensor, axis: Axis, dim: int, label: str = "") -> Tensor:
    """Concatenates x [.., k, ..] of all ranks along `dim`, in the order of the axis.

    x has the same shape on all ranks and is not modified. The result is a new [.., size*k, ..].
    """
    return start_all_gather(x, axis, dim, label, later=False).wait()


def start_all_gather(
    x: Tensor, axis: Axis, dim: int, label: str = "", later: bool = True, out: Tensor | None = None
) -> Pending:
    """Starts `all_gather`, whose result is in `out`, a contiguous tensor, if that is given."""
    if axis.size == 1:
        return Pending(x if out is None else out.copy_(x))
    dim %= x.dim()
    x = x.contiguous()
    noted = (
        note("all_gather", axis, (axis.size - 1) * x.numel(), x, label)
        if recorders or progress.active
        else None
    )
    if axis.over_nccl:
        in_order = out is not None and x.shape[:dim].numel() == 1  # blocks lie there one by one
        blocks = out if out is not None and in_order else x.new_empty((axis.size, *x.shape))
        work = _all_gather(blocks.view(-1), x.view(-1), group=axis.group, async_op=later)
        if in_order:
            return Pending(blocks, work, noted, x)
        return Pending(blocks, work, noted, x, lambda blocks: _joined(blocks, dim, out))
    return _Exchange([x] * (axis.size - 1), axis, noted, x, dim, later, out)


def reduce_scatter(x: Tensor, axis: Axis, dim: int, label: str = "") -> Tensor:
    """Sums x [.., size*k, ..] of all ranks, and returns this rank's block of the sum along `dim`.

    x is not modified. The result is a new [.., k, ..].

    Raises:
        ValueError: The size of `dim` is not a multiple of the axis size.
    """
    return start_reduce_scatter(x, axis, dim, label, later=False).wait()


def start_reduce_scatter(
    x: Tensor, axis: Axis, dim: int, label: str = "", later: bool = True, out: Tensor | None = None
) -> Pending:
    """Starts `reduce_scatter`, whose result is in `out`, a contiguous tensor, if that is given."""
    if axis.size == 1:
        return Pending(x if out is None else out.copy_(x))
    dim %= x.dim()
    if x.shape[dim] % axis.size:
        raise ValueError(
            f"cannot reduce-scatter {tuple(x.shape)} along dim {dim}: {x.shape[dim]} does not "
            f"divide over {axis.name}={axis.size}"
        )
    noted = (
        note("reduce_scatter", axis, (axis.size - 1) / axis.size * x.numel(), x, label)
        if recorders or progress.active
        else None
    )
    blocks = x.unflatten(dim, (axis.size, -1)).movedim(dim, 0)
    if axis.over_nccl:
        blocks = blocks.contiguous()
        # Not empty_like of a block as it was before stacking: that keeps the strides of a
        # transposed block, and `view(-1)` then fails. `blocks` are contiguous, and so is `out`.
        out = blocks.new_empty(blocks.shape[1:]) if out is None else out
        work = _reduce_scatter(out.view(-1), blocks.view(-1), group=axis.group, async_op=later)
        return Pending(out, work, noted, blocks)
    at = axis.index
    return _Exchange([*blocks[:at], *blocks[at + 1 :]], axis, noted, blocks[at], None, later, out)


def barrier(axes: tuple[Axis, ...]) -> None:
    """Returns when every rank of every given axis has called this function."""
    for axis in axes:
        if axis.size > 1:
            watched = progress.active
            noted = watched and watched.posted("barrier", axis, "", -1, -1, None)
            dist.barrier(group=axis.group)
            if noted:
                noted.end()


def _joined(blocks: Tensor, dim: int, out: Tensor | None) -> Tensor:
    """Joins blocks [size, *block] along a dimension of a block."""
    blocks = blocks.movedim(0, dim)
    if out is None:
        return blocks.flatten(dim, dim + 1)
    out.view(blocks.shape).copy_(blocks)
    return out
