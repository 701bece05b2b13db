"""The one door: every collective that gridformer issues is one of these functions.

They work on plain tensors and know nothing of gradients; `gridformer.comm.autograd` pairs them.
On an axis of size 1 each returns its input. `label` names the purpose in counts and traces.
Each has a form that only starts it, `start_...`, and returns a Pending to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gridformer.comm.recorder import Targets, Timing, note
from gridformer.mesh import groups
from gridformer.mesh.axes import Axis

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
# torch 2.13 renames the two single-tensor collectives; 2.11 has only the old names.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


class Pending:
    """A collective on its way. `wait()` gives its result, as often as it is asked.

    The tensors that travel are held until then. On a GPU `wait()` makes the current stream wait,
    not the host. Every rank of an axis must start its collectives in the same order.
    """

    def __init__(self, result: Tensor, work: Any = None, *held: Any) -> None:
        self._result, self._work, self._held = result, work, held
        self._steps: list[Callable[[Tensor], Tensor]] = []
        self._meanwhile: Callable[[], None] | None = None
        self._timing: Timing | None = None
        self._own: Sequence[Tensor] = ()

    def meanwhile(self, task: Callable[[], None]) -> Pending:
        """Do `task` when the result is asked for, before waiting for it."""
        self._meanwhile = task
        return self

    def timed(self, timing: Timing | None) -> Pending:
        """Tell when it is waited for, and when it is there."""
        self._timing = timing
        return self

    def own(self, *buffers: Tensor) -> Pending:
        """Memory of this message alone: it is let go of once there is a result that needs it no
        more. A thread of gloo may hold the tensors longer than those that wait for it."""
        self._own = buffers
        return self

    def then(self, step: Callable[[Tensor], Tensor]) -> Pending:
        """Apply `step` to the result when it is waited for."""
        self._steps.append(step)
        return self

    def wait(self) -> Tensor:
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
                buffer.untyped_storage().resize_(0)
        return self._result


def all_reduce(x: Tensor, axis: Axis, op: str = "sum", label: str = "") -> Tensor:
    """In place: every rank's x combined. Returns x, made contiguous if it was not."""
    return _start_all_reduce(x, axis, op, label, later=False).wait()


def start_all_reduce(x: Tensor, axis: Axis, op: str = "sum", label: str = "") -> Pending:
    return _start_all_reduce(x, axis, op, label, later=True)


def broadcast(x: Tensor, axis: Axis, root: int, label: str = "") -> Tensor:
    """In place: x of the rank with index `root`. x must be contiguous."""
    return _start_broadcast(x, axis, root, label, later=False).wait()


def start_broadcast(x: Tensor, axis: Axis, root: int, label: str = "") -> Pending:
    return _start_broadcast(x, axis, root, label, later=True)


def reduce(x: Tensor, axis: Axis, root: int, label: str = "") -> Tensor:
    """In place: on `root` the sum of every rank's x; elsewhere x's content is undefined after."""
    return _start_reduce(x, axis, root, label, later=False).wait()


def start_reduce(x: Tensor, axis: Axis, root: int, label: str = "") -> Pending:
    return _start_reduce(x, axis, root, label, later=True)


def all_gather(x: Tensor, axis: Axis, dim: int, label: str = "") -> Tensor:
    """The ranks' blocks joined along `dim`: [.., k, ..] to [.., size*k, ..]."""
    return _start_all_gather(x, axis, dim, label, later=False).wait()


def start_all_gather(x: Tensor, axis: Axis, dim: int, label: str = "") -> Pending:
    return _start_all_gather(x, axis, dim, label, later=True)


def reduce_scatter(x: Tensor, axis: Axis, dim: int, label: str = "") -> Tensor:
    """The sum of every rank's x, of which this rank keeps its block along `dim`.

    Raises ValueError when x's `dim` does not divide over the axis.
    """
    return _start_reduce_scatter(x, axis, dim, label, later=False).wait()


def start_reduce_scatter(x: Tensor, axis: Axis, dim: int, label: str = "") -> Pending:
    return _start_reduce_scatter(x, axis, dim, label, later=True)


def start_sum_of_parts(part: Callable[[int], Tensor], axis: Axis, label: str = "") -> Pending:
    """`start_reduce_scatter` of terms that are computed part by part, `part(index)` for each rank.

    Where the parts are exchanged one by one, this rank's own is computed last, while the others
    travel, and never lies beside all of them. Parts are of one shape.
    """
    if axis.size == 1:
        return Pending(part(0))
    others = [part(index) for index in range(axis.size) if index != axis.index]
    one = others[0]
    timing = _note("reduce_scatter", axis, (axis.size - 1) * one.numel(), one, label)
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
    """Return when every rank of every given axis has come here."""
    for axis in axes:
        if axis.size > 1:
            dist.barrier(group=axis.group)


# --------------------------------------------------------------------------- how each is done


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
    # Over gloo a GPU's tensor is copied back from the host on the root, too. Autograd, which may
    # have kept the root's tensor for a backward pass, must not take that for a change: `data` has
    # a version of its own.
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
    return pending.then(lambda rest: torch.cat(_around(rest, x, axis), dim))


def _start_reduce_scatter(x: Tensor, axis: Axis, dim: int, label: str, later: bool) -> Pending:
    if axis.size == 1:
        return Pending(x)
    dim %= x.dim()
    if x.shape[dim] % axis.size:
        raise ValueError(f"{x.shape[dim]} does not divide over {axis.name}={axis.size}")
    timing = _note("reduce_scatter", axis, _share(axis) * x.numel(), x, label)
    blocks = x.unflatten(dim, (axis.size, -1)).movedim(dim, 0)
    if groups.over_nccl(axis.group):
        return _reduce_scatter_blocks(blocks.contiguous(), axis, later).timed(timing)
    mine = blocks[axis.index]
    others = [block for index, block in enumerate(blocks) if index != axis.index]
    return _exchange(others, axis, later).timed(timing).then(lambda rest: _sum(rest, mine))


def _reduce_scatter_blocks(blocks: Tensor, axis: Axis, later: bool) -> Pending:
    """[size, *block], contiguous, to this rank's sum."""
    # Not empty_like, which would keep the strides of a single block: of a transposed one they are
    # not those of contiguous memory.
    out = blocks.new_empty(blocks.shape[1:])
    work = _reduce_scatter(out.view(-1), blocks.view(-1), group=axis.group, async_op=later)
    return Pending(out, work, blocks)


def _exchange(blocks: list[Tensor], axis: Axis, later: bool) -> Pending:
    """Send one block to each other rank, receive one from each: [size-1, *block], in rank order.
    Takes the blocks out of the list.

    gloo's own all-gather costs half as much processor time again, and its reduce-scatter sends
    twice the minimum; and neither would leave out the block that stays at home.
    """
    n, one = len(blocks), blocks[0]
    # `reshape` alone would give a view with gaps where a column of a wider matrix is sent.
    sent = (one if n == 1 else torch.stack(blocks)).contiguous().view(-1)
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


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _around(rest: Sequence[Tensor] | Tensor, mine: Tensor, axis: Axis) -> list[Tensor]:
    """The other ranks' blocks with this rank's in its place."""
    return [*rest[: axis.index], mine, *rest[axis.index :]]


def _sum(rest: Tensor, mine: Tensor) -> Tensor:
    total = rest[0] if len(rest) == 1 else rest.sum(0)
    return total.add_(mine)


def _share(axis: Axis) -> float:
    return (axis.size - 1) / axis.size


def _note(
    op: str, axis: Axis, moved: float, x: Tensor, label: str, targets: Targets = "all"
) -> Timing | None:
    return note(op, axis, moved, x.element_size(), label, targets)
