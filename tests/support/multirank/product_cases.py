"""Cases of tests/multirank/test_gradcheck.py: products of a grid, with norms, and lookups."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gridformer.mesh import Axes
from gridformer.parallel.tensor import summa
from tests.support.multirank.collective_cases import COL, ROW, CaseMaker
from tests.support.multirank.cutting import Case, cut, join

# How a product is computed: a schedule, and what it keeps. Each evaluation makes it again, because
# an open prefetcher must not see a weight change.
How = Callable[[Axes], tuple[summa.Schedule, summa.GatheredWeight | None, bool]]


def _gather(
    axes: Axes, keep_input: bool = False, keep_weight: bool = False, parts: int = 1
) -> tuple[Any, Any, bool]:
    weight = summa.GatheredWeight(axes.row)
    weight.open()
    schedule = summa.Gathered(axes, summa.Sharded(axes.col, -1), parts)
    return schedule, weight if keep_weight else None, keep_input


SCHEDULES: dict[str, How] = {
    "broadcast": lambda axes: (summa.Broadcast(axes), None, False),
    "pipelined": lambda axes: (summa.Pipelined(axes), None, False),
    "gather": _gather,
    "gather-parts": partial(_gather, parts=3),
}
KEEPS: dict[str, How] = {
    "gather-keep_input": partial(_gather, keep_input=True),
    "gather-keep_weight": partial(_gather, keep_weight=True),
    "gather-keep_all": partial(_gather, keep_input=True, keep_weight=True),
    "gather-parts-keep_weight": partial(_gather, keep_weight=True, parts=2),
}


def _bias(bias: Tensor, axes: Axes) -> Tensor:
    """Return [r, N] as this device's [N/c]; each copy on the rows is one variable."""
    return cut(bias, (ROW, COL), axes)[0]


def product_ab(how: How, has_bias: bool, sizes: tuple[int, ...], axes: Axes) -> Case:
    """Multiply [b, s, K] by [K, N]: rows shard b and the weight's K, columns the rest."""
    b, s, k, n = sizes

    def on_grid(a: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        schedule, weight, keep_input = how(axes)
        mine = cut(a, (ROW, None, COL), axes), cut(w, (ROW, COL), axes)
        my_bias = _bias(bias[0], axes) if bias else None
        c = summa.product_ab(*mine, schedule, my_bias, weight, keep_input)
        return join(c, (ROW, None, COL), axes)

    def plain(a: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        return a @ w + _per_row(bias, b)

    return Case([(b, s, k), (k, n), *[(axes.row.size, n)] * has_bias], on_grid, plain)


def product_abt(how: How, has_bias: bool, sizes: tuple[int, ...], axes: Axes) -> Case:
    b, s, k, n = sizes

    def on_grid(a: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        schedule, weight, _ = how(axes)
        mine = cut(a, (ROW, None, COL), axes), cut(w, (ROW, COL), axes)
        my_bias = _bias(bias[0], axes) if bias else None
        c = summa.product_abt(*mine, schedule, my_bias, weight)
        return join(c, (ROW, None, COL), axes)

    def plain(a: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        return a @ w.t() + _per_row(bias, b)

    return Case([(b, s, k), (n, k), *[(axes.row.size, n)] * has_bias], on_grid, plain)


def _per_row(bias: tuple[Tensor, ...], b: int) -> Tensor | float:
    """Return a bias for each of b sequences, from one for each row of the grid."""
    if not bias:
        return 0.0
    return bias[0].repeat_interleave(b // len(bias[0]), 0).unsqueeze(1)


def one_operand_wanted(wanted: int, product: Callable[..., Case], how: How, axes: Axes) -> Case:
    """A product whose other operand needs no gradient, so that its half of backward is skipped."""
    both = product(how, False, (2, 2, 6, 6), axes)
    generator = torch.Generator().manual_seed(4)
    constant = torch.randn(both.shapes[1 - wanted], generator=generator, dtype=torch.float64)

    def of_one(function: Callable[..., Tensor], x: Tensor) -> Tensor:
        return function(x, constant) if wanted == 0 else function(constant, x)

    return Case([both.shapes[wanted]], partial(of_one, both.on_grid), partial(of_one, both.plain))


def lookup(how: How, output_stays: bool, v: int, h: int, n_tokens: int, axes: Axes) -> Case:
    """Look up rows of a table [v, h], or of one stored as [h, v].

    The tokens differ between the rows, and some words occur twice.
    """
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, v, (axes.row.size, n_tokens, 2), generator=generator)
    tokens[:, :, 0] = v - 1
    tokens[:, 0, 1] = 0

    def on_grid(table: Tensor) -> Tensor:
        schedule, weight, _ = how(axes)
        mine = tokens[axes.row.index], cut(table, (ROW, COL), axes)
        rows = summa.lookup(*mine, schedule, axes, output_stays, weight)
        return join(rows.unsqueeze(0), (ROW, None, None, COL), axes)

    if output_stays:
        return Case([(v, h)], on_grid, lambda table: F.embedding(tokens, table))
    return Case([(h, v)], on_grid, lambda table: F.embedding(tokens, table.t()))


def products_of(rows: int, cols: int) -> dict[str, CaseMaker]:
    """M, K and N differ, and panels are at least two wide, except on 3x4 to save time."""
    both = math.lcm(rows, cols) * (1 if rows * cols > 9 else 2)
    ab, abt = (rows, 2, both, 2 * cols), (rows, 2, 2 * cols, both)
    makers: dict[str, CaseMaker] = {
        "product_ab-gather": partial(product_ab, _gather, False, ab),
        "product_abt-gather": partial(product_abt, _gather, False, abt),
    }
    for name, how in {**SCHEDULES, **KEEPS}.items():
        makers[f"product_ab-{name}-bias"] = partial(product_ab, how, True, ab)
        # the other schedules ignore what is kept
        if name in SCHEDULES or name == "gather-keep_weight":
            makers[f"product_abt-{name}-bias"] = partial(product_abt, how, True, abt)
            makers[f"lookup-output_stays-{name}"] = partial(lookup, how, True, both, 2 * cols, 2)
            makers[f"lookup-input_stays-{name}"] = partial(lookup, how, False, 2 * cols, both, 2)
    return makers


def one_wanted() -> dict[str, CaseMaker]:
    """Return these cases for 2x3 only, since they are the same everywhere."""
    makers: dict[str, CaseMaker] = {}
    for name in ("broadcast", "gather", "gather-parts", "gather-keep_all"):
        how = {**SCHEDULES, **KEEPS}[name]
        for product, maker in (("product_ab", product_ab), ("product_abt", product_abt)):
            for wanted, letter in enumerate("ab"):
                make = partial(one_operand_wanted, wanted, maker, how)
                makers[f"{product}-{name}-only_{letter}_wanted"] = make
    return makers
