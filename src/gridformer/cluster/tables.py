"""Times of kernels and messages between those that were measured, for calibrated clusters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from gridformer.cluster.file import MemoryRow, MessageRow, ProductRow

_NEAREST = 4  # measured shapes that determine the rate of another shape


def product_row_s(
    rows: Sequence[ProductRow], dtype: str, shape: tuple[int, ...], flop: float
) -> float | None:
    """Returns the time of a product at the rate of the nearest measured shapes, or None if no
    product of this type was measured.

    The distance of shapes is the difference of their logarithms; nearer shapes count more.
    """
    near = sorted(
        (sum((math.log2(a / b)) ** 2 for a, b in zip(shape, row.shape)), row.shape, row.seconds)
        for row in rows
        if row.dtype == dtype
    )[:_NEAREST]
    if not near:
        return None
    weights = [1 / (distance + 1e-6) for distance, _, _ in near]
    rates = [math.log(2 * math.prod(measured) / seconds) for _, measured, seconds in near]
    rate = math.exp(sum(w * r for w, r in zip(weights, rates)) / sum(weights))
    return flop / rate


def memory_row_s(rows: Sequence[MemoryRow], n_bytes: float) -> float:
    """Returns the time of a memory-bound kernel that moves this number of bytes."""
    return _between([(row.bytes, row.seconds) for row in rows], n_bytes)


def message_row_s(
    rows: Sequence[MessageRow], op: str, members: int, n_bytes: float, sharers: int
) -> float | None:
    """Returns the time of a message, or None if none of its kind and size of group was measured."""
    same = [row for row in rows if row.op == op and row.members == members]
    if not same:
        return None
    nearest = min({row.sharers for row in same}, key=lambda n: abs(math.log(n / sharers)))
    measured = [(row.bytes, row.seconds) for row in same if row.sharers == nearest]
    return _between(measured, n_bytes) * max(1.0, sharers / nearest)


def _between(points: Sequence[tuple[float, float]], at: float) -> float:
    """Interpolates seconds linearly between measured sizes, and in proportion beyond them."""
    points = sorted(points)
    if at <= points[0][0] or len(points) == 1:
        return points[0][1] * max(1.0, at / points[0][0])
    for (low, low_s), (high, high_s) in itertools.pairwise(points):
        if at <= high:
            return low_s + (high_s - low_s) * (at - low) / (high - low)
    return points[-1][1] * at / points[-1][0]
