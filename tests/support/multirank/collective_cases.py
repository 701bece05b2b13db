"""Cases of tests/multirank/test_gradcheck.py: each autograd pair of collectives by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gridformer.comm import autograd
from gridformer.mesh import Axes
from tests.support.multirank.cutting import Case, Dims, cut, join

ROW, COL = "row", "col"
CaseMaker = Callable[[Axes], Case]

# A whole tensor [r, c, ...] here is one variable per device: each holds [1, 1, ...] of it.
EACH: Dims = (ROW, COL)


def _other(name: str) -> str:
    return COL if name == ROW else ROW


def _over(name: str) -> int:
    """Return the dimension of [r, c, ...] that the axis `name` shards."""
    return 0 if name == ROW else 1


def _held_alike(x: Tensor, name: str, axes: Axes) -> Tensor:
    """Return [n, 2, 3], sharded over the other axis only, as this device's [1, 1, 2, 3]."""
    return cut(x, (_other(name), None, None), axes).unsqueeze(0)


def identity_allreduce(name: str, axes: Axes) -> Case:
    """Use one variable per group in as many ways as there are devices."""

    def on_grid(x: Tensor) -> Tensor:
        mine = autograd.identity_allreduce(_held_alike(x, name, axes), axes[name])
        return join(mine, (*EACH, None, None), axes)

    def plain(x: Tensor) -> Tensor:
        shape = (axes.row.size, axes.col.size, 2, 3)
        return x.unsqueeze(_over(name)).expand(shape).clone()

    return Case([(axes[_other(name)].size, 2, 3)], on_grid, plain)


def allreduce_identity(name: str, axes: Axes) -> Case:
    """Sum one variable per device to one variable per group."""

    def on_grid(x: Tensor) -> Tensor:
        total = autograd.allreduce_identity(cut(x, (*EACH, None, None), axes), axes[name])
        return join(total.squeeze(0), (_other(name), None, None), axes)

    return Case(
        [(axes.row.size, axes.col.size, 2, 3)], on_grid, lambda x: x.sum(_over(name)).clone()
    )


def allgather_reducescatter(name: str, dim: int, axes: Axes) -> Case:
    """Gather blocks to the whole, and use it in as many ways as there are devices."""
    size = axes[name].size
    shape = [2, 3, 2]
    shape[dim] *= size
    dims: list[str | None] = [_other(name), None, None, None]
    dims[dim + 1] = name

    def on_grid(x: Tensor) -> Tensor:
        block = cut(x, tuple(dims), axes).squeeze(0)
        whole = autograd.allgather_reducescatter(block, axes[name], dim)
        return join(whole[None, None], (*EACH, None, None, None), axes)

    def plain(x: Tensor) -> Tensor:
        return x.unsqueeze(_over(name)).expand(axes.row.size, axes.col.size, *shape).clone()

    return Case([(axes[_other(name)].size, *shape)], on_grid, plain)


def reducescatter_allgather(name: str, dim: int, axes: Axes) -> Case:
    """Reduce-scatter one variable per device to blocks of their sum."""
    shape = [2, 3, 2]
    shape[dim] *= axes[name].size
    dims: list[str | None] = [_other(name), None, None, None]
    dims[dim + 1] = name

    def on_grid(x: Tensor) -> Tensor:
        mine = cut(x, (*EACH, None, None, None), axes)[0, 0]
        block = autograd.reducescatter_allgather(mine, axes[name], dim)
        return join(block.unsqueeze(0), tuple(dims), axes)

    shapes = [(axes.row.size, axes.col.size, *shape)]
    return Case(shapes, on_grid, lambda x: x.sum(_over(name)).clone())


def broadcast_reduce(name: str, root: int, axes: Axes) -> Case:
    """Broadcast the root's variable, and use it differently on each device."""

    def on_grid(x: Tensor) -> Tensor:
        mine = autograd.broadcast_reduce(cut(x, (*EACH, None, None), axes), axes[name], root)
        return join(mine, (*EACH, None, None), axes)

    def plain(x: Tensor) -> Tensor:
        return x.narrow(_over(name), root, 1).expand(x.shape).clone()

    return Case([(axes.row.size, axes.col.size, 2, 3)], on_grid, plain)


def reduce_broadcast(name: str, root: int, axes: Axes) -> Case:
    """Reduce the devices' variables to the root; the others get zeros."""

    def on_grid(x: Tensor) -> Tensor:
        mine = autograd.reduce_broadcast(cut(x, (*EACH, None, None), axes), axes[name], root)
        return join(mine, (*EACH, None, None), axes)

    def plain(x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out.select(_over(name), root).copy_(x.sum(_over(name)))
        return out

    return Case([(axes.row.size, axes.col.size, 2, 3)], on_grid, plain)


def collectives_of(rows: int, cols: int) -> dict[str, CaseMaker]:
    makers: dict[str, CaseMaker] = {}
    for name, size in ((ROW, rows), (COL, cols)):
        if size == 1:
            continue
        makers[f"identity_allreduce-{name}"] = partial(identity_allreduce, name)
        makers[f"allreduce_identity-{name}"] = partial(allreduce_identity, name)
        for dim in range(3):
            make = partial(allgather_reducescatter, name, dim)
            makers[f"allgather_reducescatter-{name}-dim{dim}"] = make
            make = partial(reducescatter_allgather, name, dim)
            makers[f"reducescatter_allgather-{name}-dim{dim}"] = make
        for root in range(size):
            makers[f"broadcast_reduce-{name}-root{root}"] = partial(broadcast_reduce, name, root)
            makers[f"reduce_broadcast-{name}-root{root}"] = partial(reduce_broadcast, name, root)
    return makers
