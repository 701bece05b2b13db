"""Cases of tests/multirank/test_gradcheck.py: each autograd pair of collectives by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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


def allreduce_identity(name: str, axes: Axes) -> Case:
    """Sum one variable per device to one variable per group."""

    def on_grid(x: Tensor) -> Tensor:
        total = autograd.allreduce_identity(cut(x, (*EACH, None, None), axes), axes[name])
        return join(total.squeeze(0), (_other(name), None, None), axes)

    return Case(
        [(axes.row.size, axes.col.size, 2, 3)], on_grid, lambda x: x.sum(_over(name)).clone()
    )


def collectives_of(rows: int, cols: int) -> dict[str, CaseMaker]:
    makers: dict[str, CaseMaker] = {}
    for name, size in ((ROW, rows), (COL, cols)):
        if size > 1:
            makers[f"allreduce_identity-{name}"] = partial(allreduce_identity, name)
    return makers
