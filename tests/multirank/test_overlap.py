"""Which messages are in flight during a product: the order of a schedule's steps on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from gridformer import comm
from gridformer.comm import Pending, collectives
from gridformer.parallel.tensor import summa
from gridformer.parallel.tensor.summa import gathered, panels
from tests.support.multirank.cutting import cut, grid_axes
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
        put(torch, "mm", multiplying(torch.mm))
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
            "have all_gather row",
            "multiply",
            "send reduce_scatter col",
            "have all_gather col",
            "multiply",
            "send reduce_scatter row",
            "multiply",
            "have reduce_scatter row",
            "have reduce_scatter col",
        ]
        # dB's sum is in flight during dA's product, and during this rank's part of dB.
        assert set(found["abt backward"][:2]) == asked
        assert found["abt backward"][2:] == [
            "have all_gather col",
            "multiply",
            "send reduce_scatter row",
            "have all_gather row",
            "multiply",
            "multiply",
            "have reduce_scatter row",
        ]
