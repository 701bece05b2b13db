"""Fits the numbers of a cluster file to published measurements, and asks what these determine.

Minimizes, in logarithms, the errors of the predicted times plus the distance of the numbers from
what is assumed for any machine. Both are measured in units of their expected spread: NOISE for a
time, and SPREAD for a number. Without the second part, numbers that the data do not determine could
take any value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gridformer.cluster.file import NO_DATA, Cluster, Fitted

# What a machine's numbers are expected to be: the middle, and the spread of its logarithm.
EXPECTED = {
    "product_efficiency": (0.8, 0.2),
    "memory_efficiency": (0.75, 0.3),
    "inner_efficiency": (0.75, 0.4),
    "outer_efficiency": (0.8, 0.4),
    "slowdown_per_node": (0.02, 1.0),
}
NOISE = 0.1  # of the logarithm of a time: published steps against the best model
MOST = 0.95  # no fraction of a peak is larger
# The data determine a number if they leave less than this part of what was not known of it.
DETERMINED = 0.7
_STEPS, _DIFFERENCE = 12, 0.02

Vector = np.ndarray
Evaluate = Callable[[dict[str, float], Sequence[int]], Vector]


@dataclass
class Fit:
    """A fit.

    Attributes:
        values: The fitted numbers.
        unknown: For each the part of its expected spread that remains.
        errors: The relative error of each row.
        left_out: The relative error of each row when it is not fitted to.
        left_out_values: The numbers fitted without each row.
    """

    values: dict[str, float]
    unknown: dict[str, float]
    errors: Vector
    left_out: Vector
    left_out_values: list[dict[str, float]]


def fit(names: Sequence[str], n_rows: int, evaluate: Evaluate) -> Fit:
    """Fits numbers to all rows, and again with each row left out.

    Args:
        names: The numbers.
        n_rows: How many rows there are.
        evaluate: Called with numbers and rows; returns log(predicted / published) of their times.
    """
    every = [*range(n_rows)]
    start = np.log([EXPECTED[name][0] for name in names])
    x, jacobian = _descend(names, every, evaluate, start, None)
    spread = np.array([EXPECTED[name][1] for name in names])
    weights = jacobian.T @ jacobian / NOISE**2 + np.diag(spread**-2.0)
    remaining = np.sqrt(np.diag(np.linalg.inv(weights))) / spread
    errors = np.exp(evaluate(_named(names, x), every)) - 1
    left_out, left_out_values = [], []
    for row in every:
        others = [other for other in every if other != row]
        without, _ = _descend(names, others, evaluate, x, jacobian[others])
        left_out_values.append(_named(names, without))
        left_out.append(float(np.exp(evaluate(left_out_values[-1], [row])[0]) - 1))
    return Fit(
        _named(names, x),
        dict(zip(names, remaining.tolist())),
        errors,
        np.array(left_out),
        left_out_values,
    )


def _named(names: Sequence[str], x: Vector) -> dict[str, float]:
    return dict(zip(names, np.exp(x).tolist()))


def _descend(
    names: Sequence[str],
    rows: Sequence[int],
    evaluate: Evaluate,
    x: Vector,
    jacobian: Vector | None,
) -> tuple[Vector, Vector]:
    """Returns the logarithms of the numbers, and the derivatives of the rows by them.

    Gauss-Newton steps; with a given Jacobian, which is then kept, only few of them.
    """
    middle = np.log([EXPECTED[name][0] for name in names])
    spread = np.array([EXPECTED[name][1] for name in names])
    top = np.log([1.0 if name == "slowdown_per_node" else MOST for name in names])
    keep = jacobian is not None
    for _ in range(3 if keep else _STEPS):
        residual = evaluate(_named(names, x), rows)
        if not keep:
            columns = []
            for i in range(len(names)):
                moved = x.copy()
                moved[i] += _DIFFERENCE
                columns.append((evaluate(_named(names, moved), rows) - residual) / _DIFFERENCE)
            jacobian = np.stack(columns, 1)
        assert jacobian is not None
        step = _bounded_step(jacobian, residual, x, middle, spread, top)
        x = x + step
        if np.abs(step).max() < 2e-3:
            break
    assert jacobian is not None
    return x, jacobian


def _bounded_step(
    jacobian: Vector, residual: Vector, x: Vector, middle: Vector, spread: Vector, top: Vector
) -> Vector:
    """Returns the step to the minimum of the linearized problem, with numbers at most `top`."""
    fixed = np.zeros(len(x), bool)
    while True:
        step = np.where(fixed, top - x, 0.0)
        free = ~fixed
        if free.any():
            rest = residual + jacobian @ step
            a = jacobian[:, free]
            weights = a.T @ a / NOISE**2 + np.diag(spread[free] ** -2.0)
            slope = a.T @ rest / NOISE**2 + (x - middle)[free] / spread[free] ** 2
            step[free] = -np.linalg.solve(weights, slope)
        over = free & (x + step > top + 1e-12)
        if not over.any():
            return np.clip(step, -0.7, 0.7)
        fixed |= over


def with_fitted(cluster: Cluster, values: Mapping[str, float]) -> Cluster:
    """Returns a cluster with other values of fitted numbers."""
    new = Fitted(value=0, source="caller", data=NO_DATA, identified=False)
    fitted = {
        name: cluster.fitted.get(name, new).model_copy(update={"value": value})
        for name, value in values.items()
    }
    return cluster.model_copy(update={"fitted": {**cluster.fitted, **fitted}})
