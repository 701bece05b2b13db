"""Products of grids: which messages are in flight, which weights are kept, and their buffers."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from gridformer import comm
from gridformer.comm import Pending, collectives, record_messages
from gridformer.mesh import Axes
from gridformer.parallel.tensor import summa
from gridformer.parallel.tensor.summa import gathered, gathered_weights_scope, panels
from tests.support.multirank.cutting import cut, grid_axes
from tests.support.multirank.exactness import batch_of, built, tiny
from tests.support.multirank.nccl_path import Over, on_both_paths
from tests.support.multirank.pool import WorkerPool

ROW, COL = "row", "col"


@contextmanager
def watched() -> Iterator[list[str]]:
    """Record events: `send x`, `have x` when its result is waited for, and `multiply`."""
    events: list[str] = []

    class Watched:
        """A message whose events are recorded."""

        def __init__(self, pending: Pending, what: str) -> None:
            events.append(f"send {what}")
            self.pending, self.what = pending, what

        def wait(self) -> Tensor:
            if self.what:
                events.append(f"have {self.what}")
                self.what = ""
            return self.pending.wait()

    def starting(real: Callable[..., Pending], what: str) -> Callable[..., Any]:
        def start(x: Tensor, axis: Any, *args: Any, **kwargs: Any) -> Any:
            watched = Watched(real(x, axis, *args, **kwargs), f"{what} {axis.name}")
            if not kwargs.get("later", True):
                watched.wait()
            return watched

        return start

    class SumOfBlocks(comm.SumOfBlocks):
        def __init__(self, others: list[Tensor], axis: Any, label: str) -> None:
            super().__init__(others, axis, label)
            events.append(f"send reduce_scatter {axis.name}")
            self.name = axis.name

        def add(self, own: Tensor) -> Any:
            total = Watched(super().add(own), f"reduce_scatter {self.name}")
            events.pop()
            return total

    def multiplying(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def multiply(*args: Any, **kwargs: Any) -> Tensor:
            events.append("multiply")
            return real(*args, **kwargs)

        return multiply

    with ExitStack() as stack:

        def put(module: Any, name: str, value: Any) -> None:
            stack.enter_context(patch.object(module, name, value))

        for what in ("all_gather", "reduce_scatter", "broadcast", "reduce"):
            put(comm, f"start_{what}", starting(getattr(collectives, f"start_{what}"), what))
        put(comm, "SumOfBlocks", SumOfBlocks)
        for module in (panels, gathered):
            for name in ("times", "transposed_times"):
                put(module, name, multiplying(getattr(module, name)))
        put(panels, "wide_product", multiplying(panels.wide_product))
        put(torch, "mm", multiplying(torch.mm))
        put(torch, "bmm", multiplying(torch.bmm))
        put(torch, "matmul", multiplying(torch.matmul))
        put(Tensor, "addmm_", multiplying(Tensor.addmm_))
        yield events


def operands(rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """Return blocks of two square matrices."""
    axes, n = grid_axes(rows, cols), 2 * rows * cols
    mine = (cut(torch.ones(n, n), (ROW, COL), axes).clone().requires_grad_() for _ in range(2))
    a, b = mine
    return a, b


def panel_by_panel(rows: int, cols: int, schedule: type[summa.Broadcast]) -> list[list[str]]:
    a, b = operands(rows, cols)
    made = schedule(grid_axes(rows, cols))
    found = []
    for product in (made.ab, made.abt, made.atb):
        with watched() as events, torch.no_grad():
            product(summa.Operand(a), summa.Operand(b))
        found.append(events)
    return found


def one_by_one(n_panels: int, sent: tuple[str, ...], summed: str) -> list[str]:
    """Nothing is in flight while a panel is multiplied."""
    step = [f"{verb} {what}" for what in sent for verb in ("send", "have")] + ["multiply"]
    return (step + [f"{verb} {summed}" for verb in ("send", "have") if summed]) * n_panels


def one_ahead(n_panels: int, sent: tuple[str, ...], summed: str) -> list[str]:
    """The next panel and the previous panel's sum are in flight during a product."""
    events: list[str] = []
    for turn in range(n_panels + 1):
        if turn < n_panels:
            events += [f"send {what}" for what in sent]
        if turn:
            events += [f"have {what}" for what in sent] + ["multiply"]
            events += [f"send {summed}"] * bool(summed)
            events += [f"have {summed}"] * (bool(summed) and turn > 1)
    return events + [f"have {summed}"] * bool(summed)


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [(summa.Broadcast, one_by_one), (summa.Pipelined, one_ahead)],
    ids=["broadcast", "pipelined"],
)
@pytest.mark.parametrize(("grid", "n_panels"), [((2, 2), 2), ((2, 3), 4)], ids=str)
def test_panels_in_flight(
    pool: WorkerPool,
    grid: tuple[int, int],
    n_panels: int,
    schedule: type[summa.Broadcast],
    steps: Callable[[int, tuple[str, ...], str], list[str]],
) -> None:
    for ab, abt, atb in pool.run(grid[0] * grid[1], panel_by_panel, *grid, schedule):
        assert ab == steps(n_panels, ("broadcast col", "broadcast row"), "")
        assert abt == steps(n_panels, ("broadcast row",), "reduce col")
        assert atb == steps(n_panels, ("broadcast col",), "reduce row")


def gathering(rows: int, cols: int) -> dict[str, list[str]]:
    a, b = operands(rows, cols)
    axes = grid_axes(rows, cols)
    schedule = summa.Gathered(axes, summa.Sharded(axes.col, -1))
    found = {}
    for name, product in (("ab", summa.product_ab), ("abt", summa.product_abt)):
        with watched() as events:
            c = product(a, b, schedule)
        found[name] = events
        with watched() as events:
            c.backward(torch.ones_like(c))
        found[f"{name} backward"] = events
    return found


def test_sums_travel_while_the_other_gradient_is_multiplied(pool: WorkerPool) -> None:
    """With gather, backward first starts both operands' gathers."""
    for found in pool.run(6, gathering, 2, 3):
        asked = {"send all_gather row", "send all_gather col"}
        assert set(found["ab"][:2]) == asked
        assert found["ab"][-1] == "multiply"
        assert found["abt"] == [
            "send all_gather row",
            "have all_gather row",
            "multiply",
            "send reduce_scatter col",
            "have reduce_scatter col",
        ]
        # dA's sum is in flight during dB's product, and both sums during this rank's part of dB.
        assert set(found["ab backward"][:2]) == asked
        assert found["ab backward"][2:] == [
            "have all_gather row", "multiply", "send reduce_scatter col", "have all_gather col",
            "multiply", "send reduce_scatter row", "multiply", "have reduce_scatter row",
            "have reduce_scatter col",
        ]  # fmt: skip
        # dB's sum is in flight during this rank's part of dB, and during dA's product.
        assert set(found["abt backward"][:2]) == asked
        assert found["abt backward"][2:] == [
            "have all_gather col", "multiply", "send reduce_scatter row", "multiply",
            "have all_gather row", "multiply", "have reduce_scatter row",
        ]  # fmt: skip


# --------------------------------------------------- sums that are waited for later


class Chain(nn.Module):
    """Two products, the second of which leaves the sum of its gradient to the first."""

    def __init__(self, rows: int, cols: int, input_stationary: bool) -> None:
        super().__init__()
        axes, n = grid_axes(rows, cols), 2 * rows * cols
        self.schedule = summa.Gathered(axes, summa.Sharded(axes.col, -1))
        self.turned = input_stationary
        self.weights = nn.ParameterList(
            cut(matrix(n, n, seed=seed), (COL, ROW) if seed and self.turned else (ROW, COL), axes)
            for seed in range(2)
        )
        self.x = cut(matrix(n, n, seed=2), (ROW, COL), axes)
        first, second = (summa.GatheredWeight(axes.row, keeps=False) for _ in range(2))
        first.after, second.before = second, first
        second.parameters, second.turned = lambda: (self.weights[1],), self.turned
        self.first, self.gathered_weight = first, second
        first.open()

    def forward(self, cut_between: bool = False) -> Tensor:
        y = summa.product_ab(self.x, self.weights[0], self.schedule, weight=self.first)
        y, w, how = y.detach() if cut_between else y, self.weights[1], self.gathered_weight
        if self.turned:
            return summa.product_abt(y, w.t(), self.schedule, weight=how)
        return summa.product_ab(y, w, self.schedule, weight=how)


def leaving(input_stationary: bool) -> list[str]:
    """Return the events of a backward pass, after comparing gradients of several passes."""
    chain = Chain(3, 2, input_stationary)

    def gradients() -> list[Tensor]:
        chain.zero_grad()
        for _ in range(2):  # the second one adds to the gradients of the first
            chain().square().sum().backward()
        return [p.grad for p in chain.weights if p.grad is not None]

    plain = gradients()  # outside of a scope nothing is left to others
    with gathered_weights_scope(chain):
        for mine, theirs in zip(gradients(), plain, strict=True):
            torch.testing.assert_close(mine, theirs)
        loss = chain().sum()
        with watched() as events:
            torch.autograd.backward(loss, retain_graph=True)
        assert torch.autograd.grad(loss, chain.weights[1])[0].isfinite().all()  # and once more
        frozen = chain.weights[1].requires_grad_(False)
        chain().sum().backward()
        frozen.requires_grad_(True)
    with pytest.raises(RuntimeError, match="gradient was lost"), gathered_weights_scope(chain):
        chain(cut_between=True).sum().backward()
    return events


@pytest.mark.parametrize("input_stationary", [False, True])
@on_both_paths
def test_a_sum_travels_while_the_product_before_goes_backward(
    pool: WorkerPool, over: Over, input_stationary: bool
) -> None:
    for events in pool.run(6, *over, leaving, input_stationary):
        sums = [i for i, event in enumerate(events) if event.endswith("reduce_scatter row")]
        first_sent, *_, last_waited = sums
        assert [events[i][:4] for i in sums] == ["send", "send", "have", "have"], events
        assert events[first_sent:last_waited].count("multiply") >= 1, events
        # Over gloo the blocks of others are multiplied first.
        assert events.count("multiply") == (3 if over else 7), events


# --------------------------------------------------- weights that are kept

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
    model, axes, _ = built(layout, tiny(n_layers=2))
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


# --------------------------------------------------- workspace


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
    for seen, elements, most in pool.run(rows * cols, workspace_of, rows, cols, name):
        assert seen[0]
        assert seen[1] == seen[0]
        assert seen[2] == seen[0]
        assert elements <= in_flight * most
