"""Weights that are kept while they do not change, and buffers that products reuse."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gridformer.comm import record_messages
from gridformer.config import LayoutConfig
from gridformer.mesh import Axes
from gridformer.parallel import build_parallel
from gridformer.parallel.tensor import summa
from gridformer.parallel.tensor.summa import gathered_weights_scope
from tests.support.multirank.cutting import cut, grid_axes
from tests.support.multirank.exactness import CPU, axes_of, batch_of, tiny
from tests.support.multirank.pool import WorkerPool

ROW, COL = "row", "col"
Gathers = Counter[str]  # of one product, by axis


def matrix(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


class Product:
    """C = A B on a grid, with an optimizer that changes B."""

    def __init__(self, axes: Axes, cell: summa.GatheredWeight) -> None:
        n = 2 * axes.row.size * axes.col.size
        self.axes = axes
        self.schedule = summa.Gathered(axes, summa.Sharded(axes.col, -1))
        self.weight = cell
        self.a = cut(matrix(n, n, seed=1), (ROW, COL), axes).clone().requires_grad_()
        self.b = nn.Parameter(cut(matrix(n, n, seed=2), (ROW, COL), axes).clone())
        self.optimizer = torch.optim.AdamW([self.b], lr=0.1, fused=True)

    def forward_backward(self) -> Gathers:
        """Run one evaluation, and check its value and gradient against the current weights."""
        self.a.grad = None
        with record_messages() as recorder:
            c = summa.product_ab(self.a, self.b, self.schedule, weight=self.weight)
            c.backward(torch.ones_like(c))
        a = self.a.detach().clone().requires_grad_()
        want = summa.product_ab(a, self.b.detach(), summa.Broadcast(self.axes))
        want.backward(torch.ones_like(want))
        torch.testing.assert_close(c, want)
        torch.testing.assert_close(self.a.grad, a.grad)
        return Counter(r.axis for r in recorder.records if r.op == "all_gather")

    def update(self) -> None:
        """Update as training does: a fused optimizer leaves no mark that autograd would see."""
        before = self.b.detach().clone()
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert not torch.equal(self.b, before)


def once_a_step(rows: int, cols: int) -> None:
    """A weight is gathered once in each step, and never kept into the next step."""
    axes = grid_axes(rows, cols)
    cell = summa.GatheredWeight(axes.row)
    product = Product(axes, cell)
    for _ in range(3):
        cell.open()
        gathers = [product.forward_backward() for _ in range(3)]
        assert [g[ROW] for g in gathers] == [1, 0, 0]
        assert [g[COL] for g in gathers] == [2 * (cols > 1)] * 3, "inputs are not kept"
        cell.close()
        product.update()


def never_when_closed(rows: int, cols: int) -> None:
    """Nothing is kept when closed, whether it was open before or not."""
    axes = grid_axes(rows, cols)
    cell = summa.GatheredWeight(axes.row)
    product = Product(axes, cell)
    for _ in range(2):
        for _ in range(2):
            assert product.forward_backward()[ROW] == 2
            product.update()
        cell.open()
        product.forward_backward()
        cell.close()


def both_types(rows: int, cols: int) -> None:
    """Both types are kept of a weight used in two, such as the table of embedding and head."""
    axes = grid_axes(rows, cols)
    cell = summa.GatheredWeight(axes.row)
    product = Product(axes, cell)
    cell.open()
    gathers = []
    for _ in range(2):
        for dtype in (torch.float64, torch.bfloat16):
            a = product.a.detach().to(dtype)
            with record_messages() as recorder:
                c = summa.product_ab(a, product.b, product.schedule, weight=cell)
            assert c.dtype == dtype
            gathers.append(recorder.count(axis=ROW)["all_gather"])
    assert gathers == [1, 1, 0, 0]


@pytest.mark.parametrize("grid", [(2, 2), (2, 3), (3, 1)], ids=str)
@pytest.mark.parametrize("check", [once_a_step, never_when_closed, both_types])
def test_a_kept_weight(pool: WorkerPool, grid: tuple[int, int], check: Any) -> None:
    pool.run(grid[0] * grid[1], check, *grid)


def opened_cells(layout: dict[str, Any]) -> tuple[int, bool]:
    """Return how many weights are gathered in the scope of a step, and any after an error."""
    plan = LayoutConfig(**layout)
    axes = axes_of(plan)
    model = build_parallel(tiny(n_layers=2), plan, axes, 1, CPU)
    part = batch_of(0, model.config, 4).chunk(axes.row.size)[axes.row.index]
    weights = [vars(module).get("gathered_weight") for module in model.modules()]
    cells = {id(cell): cell for cell in weights if cell is not None}

    def held() -> int:
        return sum(bool(cell._operands) for cell in cells.values())

    model.loss_sum(part[:, :-1], part[:, 1:]).backward()
    assert not held(), "outside of the scope nothing is kept"
    inside = 0
    with contextlib.suppress(ZeroDivisionError), gathered_weights_scope(model):
        model.loss_sum(part[:, :-1], part[:, 1:]).backward()
        inside = held()
        raise ZeroDivisionError
    return inside, held() > 0


@pytest.mark.parametrize(("keep", "n_cells"), [("none", 0), ("inputs", 0), ("weights", 9)])
def test_prefetchers_keep_weights_for_one_step(pool: WorkerPool, keep: str, n_cells: int) -> None:
    """There are four per layer, and one for the table that embedding and head share."""
    layout = {"scheme": "optimus", "rows": 2, "cols": 2, "keep_gathered": keep}
    assert pool.run(4, opened_cells, layout) == [(n_cells, False)] * 4


# --------------------------------------------------------------------------- workspace


def workspace_of(rows: int, cols: int, name: str) -> tuple[list[dict[Any, int]], int, int]:
    """Return addresses of a schedule's buffers after each round of all products.

    The other results are the buffers' elements, and those of one panel of each kind.
    """
    axes = grid_axes(rows, cols)
    schedule = {"broadcast": summa.Broadcast, "pipelined": summa.Pipelined}[name](axes)
    n, s = 2 * rows * cols, 5
    seen = []
    for round_ in range(3):
        a = cut(matrix(rows * s, n, seed=round_), (ROW, COL), axes).clone().requires_grad_()
        b = cut(matrix(n, n, seed=round_ + 9), (ROW, COL), axes).clone().requires_grad_()
        c = summa.product_ab(a, b, schedule)
        summa.product_abt(c, b, schedule).sum().backward()
        buffers = schedule.workspace._buffers
        seen.append({key: tensor.data_ptr() for key, tensor in buffers.items()})
    elements = sum(tensor.numel() for tensor in schedule.workspace._buffers.values())
    panel = n // max(rows, cols)  # the widest possible panel
    return seen, elements, panel * (s + n // cols) + panel * max(s, n // cols)


@pytest.mark.parametrize(("name", "in_flight"), [("broadcast", 1), ("pipelined", 2)])
@pytest.mark.parametrize("grid", [(2, 2), (2, 3), (3, 2)], ids=str)
def test_workspace_is_allocated_once(
    pool: WorkerPool, grid: tuple[int, int], name: str, in_flight: int
) -> None:
    """It is no larger than the one or two panels in flight."""
    rows, cols = grid
    for seen, elements, panels in pool.run(rows * cols, workspace_of, rows, cols, name):
        assert seen[0]
        assert seen[1] == seen[0]
        assert seen[2] == seen[0]
        assert elements <= in_flight * panels
