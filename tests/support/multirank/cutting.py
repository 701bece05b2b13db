"""Shards whole tensors into blocks and joins them again, as two transposed autograd functions.

With them a test can treat what a grid of devices computes together as one function of whole
tensors, which every rank evaluates in the same way: `join(op(cut(whole)))`. That function is
compared with the plain computation, and is what gradcheck checks. Nothing here uses gridformer's
collectives.

`dims` says how a tensor is sharded: for each dimension, the axis that shards it ("row", "col") or
None. Along an axis that `dims` does not name, every device holds the same block, and that block
counts as one variable (see gridformer.comm.autograd): `cut` then expects the same gradient on every
device of the axis, and `join` hands each of them the same gradient. A test that means one variable
per device says so with a dimension of the axis's size that the axis shards.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gridformer.config import LayoutConfig
from gridformer.mesh import Axes
from tests.support.multirank.exactness import axes_of

Dims = tuple[str | None, ...]
ROW, COL = "row", "col"
# A whole tensor [r, c, ...] here is one variable per device: each holds [1, 1, ...] of it.
EACH: Dims = (ROW, COL)


def grid_axes(rows: int, cols: int) -> Axes:
    return axes_of(LayoutConfig(scheme="optimus", rows=rows, cols=cols))


def cut(whole: Tensor, dims: Dims, axes: Axes) -> Tensor:
    """Return this device's block. Backward joins the devices' gradients."""
    block: Tensor = _Moved.apply(whole, dims, axes, False)
    return block


def join(block: Tensor, dims: Dims, axes: Axes) -> Tensor:
    """Return the whole tensor on every device. Backward takes this device's gradient block."""
    whole: Tensor = _Moved.apply(block, dims, axes, True)
    return whole


@dataclass
class Case:
    """Two ways to compute the same function of whole float64 tensors of these shapes."""

    shapes: list[tuple[int, ...]]
    on_grid: Callable[..., Tensor]
    plain: Callable[..., Tensor]


CaseMaker = Callable[[Axes], Case]


def check(case: Case) -> None:
    """Compare the values and gradients of both ways, element by element, on every rank.

    The outputs are weighted at random, so that no two of them have the same gradient.
    """
    inputs, generator = _inputs(case)
    found, want = case.on_grid(*inputs), case.plain(*inputs)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
    weights = torch.randn(found.shape, generator=generator, dtype=found.dtype)
    gradients = zip(
        torch.autograd.grad(found, inputs, weights), torch.autograd.grad(want, inputs, weights)
    )
    for ours, plain in gradients:
        torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-11)


def check_differences(case: Case) -> None:
    """Compare both ways, and the grid's gradient with finite differences, on every rank."""
    check(case)
    inputs, _ = _inputs(case)
    # Check the whole Jacobian in small cases on 2x2, and its product with random vectors elsewhere.
    whole = dist.get_world_size() == 4 and sum(x.numel() for x in inputs) <= 36
    torch.autograd.gradcheck(case.on_grid, inputs, fast_mode=not whole)


def _inputs(case: Case) -> tuple[list[Tensor], torch.Generator]:
    generator = torch.Generator().manual_seed(3)
    inputs = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in case.shapes
    ]
    return inputs, generator


class _Moved(torch.autograd.Function):
    """Takes a block of a whole tensor or joins blocks; backward does the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: Dims, axes: Axes, joins: bool) -> Tensor:
        ctx.args = dims, axes, not joins
        return _moved(x, dims, axes, joins)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _moved(grads[0], *ctx.args), None, None, None


def _moved(x: Tensor, dims: Dims, axes: Axes, joins: bool) -> Tensor:
    return _assemble(x, dims, axes) if joins else x[_block(x.shape, dims, axes)]


def _block(shape: torch.Size, dims: Dims, axes: Axes) -> tuple[slice, ...]:
    assert len(shape) == len(dims), (shape, dims)
    slices = []
    for size, name in zip(shape, dims):
        axis = axes[name] if name else None
        n, index = (axis.size, axis.index) if axis else (1, 0)
        assert size % n == 0, f"the test cuts {size} over {name}={n}"
        slices.append(slice(index * size // n, (index + 1) * size // n))
    return tuple(slices)


def _assemble(block: Tensor, dims: Dims, axes: Axes) -> Tensor:
    """Return the whole tensor from the blocks of devices at index 0 of every axis not in `dims`."""
    sizes = [n * (axes[name].size if name else 1) for n, name in zip(block.shape, dims)]
    whole = block.new_zeros(sizes)
    here = _block(whole.shape, dims, axes)
    if all(axes[name].index == 0 for name in ("row", "col") if name not in dims):
        whole[here] = block
    if axes.world.size > 1:
        dist.all_reduce(whole)
    assert torch.equal(whole[here], block), f"devices that should agree do not: {dims}"
    return whole
