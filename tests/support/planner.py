"""Predictions of published steps, made in processes of their own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def in_own_process(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls in a process of its own, because a trace registers a type of device."""
    with ProcessPoolExecutor(1, get_context("forkserver")) as pool:
        return pool.submit(call, *args, **kwargs).result()


def two_rows_of_frontera() -> dict[str, float]:
    """Returns the errors of the largest published runs of both schemes on Frontera."""
    from benchmarks.planner.pricing import cluster_of, error, predicted, record
    from benchmarks.planner.rows import FRONTERA, calibration_rows

    rows = [row for row in calibration_rows(FRONTERA) if row.run.layout.n_processes == 64]
    found = {}
    for row in rows:
        found[row.name] = error(row, predicted(record(row), cluster_of(row)))
    return found
