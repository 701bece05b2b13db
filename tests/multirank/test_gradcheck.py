"""Every autograd collective and every 2-D operation, against finite differences on real processes.

Each case is a function of whole tensors, computed by the grid between `cut` and `join`. Its value
must equal the plain computation's, and its gradient the finite differences' (all ranks perturb the
same element at the same time).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridformer.comm import Axes, autograd
from gridformer.models.blocks import IGNORE, LayerNorm
from gridformer.parallel import summa
from gridformer.parallel.loss import CutCrossEntropy
from gridformer.parallel.optimus import GridLayerNorm
from tests.multirank.cutting import Case, Dims, check, cut, grid_axes, join
from tests.multirank.pool import WorkerPool

ROW, COL = "row", "col"
GRIDS = [(1, 3), (3, 1), (2, 2), (2, 3), (3, 2), (3, 4)]


# --------------------------------------------------------------------------- collectives

# A whole tensor [r, c, ...] here is one variable a device: each holds [1, 1, ...] of it.
EACH: Dims = (ROW, COL)


def _other(name: str) -> str:
    return COL if name == ROW else ROW


def _over(name: str) -> int:
    """The dimension of [r, c, ...] along which the axis `name` lies."""
    return 0 if name == ROW else 1


def _held_alike(x: Tensor, name: str, axes: Axes) -> Tensor:
    """[n, 2, 3] cut over the other axis only, as this device's [1, 1, 2, 3]."""
    return cut(x, (_other(name), None, None), axes).unsqueeze(0)


def identity_allreduce(name: str, axes: Axes) -> Case:
    """One variable a group in, used in as many ways as there are devices."""

    def on_grid(x: Tensor) -> Tensor:
        mine = autograd.identity_allreduce(_held_alike(x, name, axes), axes[name])
        return join(mine, (*EACH, None, None), axes)

    def plain(x: Tensor) -> Tensor:
        shape = (axes.row.size, axes.col.size, 2, 3)
        return x.unsqueeze(_over(name)).expand(shape).clone()

    return Case([(axes[_other(name)].size, 2, 3)], on_grid, plain)


def allreduce_identity(name: str, axes: Axes) -> Case:
    """One variable a device in, their sum out: one variable a group."""

    def on_grid(x: Tensor) -> Tensor:
        total = autograd.allreduce_identity(cut(x, (*EACH, None, None), axes), axes[name])
        return join(total.squeeze(0), (_other(name), None, None), axes)

    return Case(
        [(axes.row.size, axes.col.size, 2, 3)], on_grid, lambda x: x.sum(_over(name)).clone()
    )


def allgather_reducescatter(name: str, dim: int, axes: Axes) -> Case:
    """Blocks in; out the whole, used in as many ways as there are devices."""
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
    """One variable a device in, blocks of their sum out."""
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
    """The root's variable out on every device, used differently on each."""

    def on_grid(x: Tensor) -> Tensor:
        mine = autograd.broadcast_reduce(cut(x, (*EACH, None, None), axes), axes[name], root)
        return join(mine, (*EACH, None, None), axes)

    def plain(x: Tensor) -> Tensor:
        return x.narrow(_over(name), root, 1).expand(x.shape).clone()

    return Case([(axes.row.size, axes.col.size, 2, 3)], on_grid, plain)


def reduce_broadcast(name: str, root: int, axes: Axes) -> Case:
    """The sum of the devices' variables out on the root, zeros elsewhere."""

    def on_grid(x: Tensor) -> Tensor:
        mine = autograd.reduce_broadcast(cut(x, (*EACH, None, None), axes), axes[name], root)
        return join(mine, (*EACH, None, None), axes)

    def plain(x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out.select(_over(name), root).copy_(x.sum(_over(name)))
        return out

    return Case([(axes.row.size, axes.col.size, 2, 3)], on_grid, plain)


# --------------------------------------------------------------------------- products


def product_ab(b: int, s: int, k: int, n: int, axes: Axes) -> Case:
    """[b, s, K] times [K, N], b over rows, K of the weight over rows, the rest over columns."""

    def on_grid(a: Tensor, w: Tensor) -> Tensor:
        mine = cut(a, (ROW, None, COL), axes), cut(w, (ROW, COL), axes)
        return join(summa.product_ab(*mine, axes), (ROW, None, COL), axes)

    return Case([(b, s, k), (k, n)], on_grid, lambda a, w: a @ w)


def product_abt(b: int, s: int, k: int, n: int, axes: Axes) -> Case:
    def on_grid(a: Tensor, w: Tensor) -> Tensor:
        mine = cut(a, (ROW, None, COL), axes), cut(w, (ROW, COL), axes)
        return join(summa.product_abt(*mine, axes), (ROW, None, COL), axes)

    return Case([(b, s, k), (n, k)], on_grid, lambda a, w: a @ w.t())


def product_atb(k: int, m: int, n: int, axes: Axes) -> Case:
    def on_grid(a: Tensor, b: Tensor) -> Tensor:
        mine = cut(a, (ROW, COL), axes), cut(b, (ROW, COL), axes)
        return join(summa.product_atb(*mine, axes), (ROW, COL), axes)

    return Case([(k, m), (k, n)], on_grid, lambda a, b: a.t() @ b)


def one_hot_product(v: int, h: int, n_tokens: int, axes: Axes) -> Case:
    """Tokens differ between the rows, or (as positions do) are the same; some words occur twice."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, v, (axes.row.size, n_tokens, 2), generator=generator)
    tokens[:, 0] = torch.tensor([v - 1, 0])

    def on_grid(table: Tensor) -> Tensor:
        mine = tokens[axes.row.index]
        rows = summa.one_hot_product(mine, cut(table, (ROW, COL), axes), axes)
        return join(rows.unsqueeze(0), (ROW, None, None, COL), axes)

    return Case([(v, h)], on_grid, lambda table: F.embedding(tokens, table))


# --------------------------------------------------------------------------- norm and loss


def layer_norm(h: int, eps: float, offset: float, axes: Axes) -> Case:
    """The weights' copies on the rows count as one variable a row: their gradients are partial."""
    rows, cols = axes.row.size, axes.col.size
    with torch.device("meta"):
        module = GridLayerNorm(LayerNorm(h, eps), axes)
    assert module.weight.shape == module.bias.shape == (h // cols,)

    def on_grid(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        values = {
            "weight": cut(weight, (ROW, COL), axes)[0],
            "bias": cut(bias, (ROW, COL), axes)[0],
        }
        mine = cut(x, (ROW, None, COL), axes)
        return join(
            torch.func.functional_call(module, values, (mine + offset,)), (ROW, None, COL), axes
        )

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        normed = F.layer_norm(x + offset, (h,), eps=eps)
        return normed * weight.unsqueeze(1) + bias.unsqueeze(1)

    return Case([(rows, 2, h), (rows, h), (rows, h)], on_grid, plain)


def cross_entropy(v: int, padded: int, axes: Axes) -> Case:
    """A row of devices computes the loss of its tokens: one variable that all of them hold."""
    rows = axes.row.size
    generator = torch.Generator().manual_seed(2)
    targets = torch.randint(0, v, (rows, 2, 2), generator=generator)
    targets[:, 0, 0] = v - 1
    targets[-1, 1, 1] = IGNORE
    loss: nn.Module = CutCrossEntropy(axes.col, v)

    def on_grid(logits: Tensor) -> Tensor:
        # What padded columns hold must not matter; 50 would be the largest logit by far.
        overhang = torch.zeros(padded, dtype=logits.dtype)
        overhang[v:] = 50.0
        mine = cut(logits + overhang, (ROW, None, None, COL), axes)
        value = loss(mine[0], targets[axes.row.index])
        return join(value.unsqueeze(0), (ROW,), axes)

    def plain(logits: Tensor) -> Tensor:
        each = [
            F.cross_entropy(x[..., :v].flatten(0, 1), t.flatten(), reduction="sum")
            for x, t in zip(logits, targets)
        ]
        return torch.stack(each)

    return Case([(rows, 2, 2, padded)], on_grid, plain)


# --------------------------------------------------------------------------- the grids

CaseMaker = Callable[[Axes], Case]


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


def products_of(rows: int, cols: int) -> dict[str, CaseMaker]:
    """M, K and N differ, and panels are at least two wide, except on 3x4 to save time."""
    both = math.lcm(rows, cols) * (1 if rows * cols > 9 else 2)
    return {
        "product_ab": partial(product_ab, rows, 2, both, 2 * cols),
        "product_abt": partial(product_abt, rows, 2, 2 * cols, both),
        "product_atb": partial(product_atb, 2 * rows, both, 2 * cols),
        "one_hot_product": partial(one_hot_product, 3 * rows, 2 * cols, 4),
        "layer_norm-one-column-each": partial(layer_norm, cols, 1e-5, 0.0),
        "layer_norm": partial(layer_norm, 2 * cols, 1e-1, 3.0),
        "cross_entropy": partial(cross_entropy, 3 * cols, 3 * cols),
        "cross_entropy-padded": partial(cross_entropy, 3 * cols - 1, 3 * cols),
        "cross_entropy-rank-of-padding": partial(cross_entropy, 2 * cols - 1, 3 * cols),
    }


MAKERS = {(r, c): {**collectives_of(r, c), **products_of(r, c)} for r, c in GRIDS}
CASES = [(grid, name) for grid, makers in MAKERS.items() for name in makers]


def check_on_rank(grid: tuple[int, int], name: str) -> None:
    """What one rank does."""
    check(MAKERS[grid][name](grid_axes(*grid)))


@pytest.mark.parametrize(("grid", "name"), CASES, ids=[f"{r}x{c}-{name}" for (r, c), name in CASES])
def test_gradients_equal_finite_differences(
    pool: WorkerPool, grid: tuple[int, int], name: str
) -> None:
    pool.run(math.prod(grid), check_on_rank, grid, name)
