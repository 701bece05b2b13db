"""Checks autograd collectives and 2-D operations against finite differences on real processes.

Each case is a function of whole tensors, computed by the grid between `cut` and `join`. Its value
must equal the plain computation's, and its gradient must equal the finite differences (all ranks
perturb the same element at the same time).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridformer.mesh import Axes
from gridformer.models.blocks import IGNORE, LayerNorm
from gridformer.parallel.tensor import summa
from gridformer.parallel.tensor.boundary import Replicated, Sharded
from gridformer.parallel.tensor.loss import VocabParallelCrossEntropy
from gridformer.parallel.tensor.norm import GridLayerNorm
from tests.support.marks import full_unless
from tests.support.multirank.collective_cases import COL, EACH, ROW, CaseMaker, collectives_of
from tests.support.multirank.cutting import Case, Dims, check, cut, grid_axes, join
from tests.support.multirank.nccl_path import on_nccl
from tests.support.multirank.pool import WorkerPool

GRIDS = [(1, 3), (3, 1), (2, 2), (2, 3), (3, 2), (3, 4)]


# --------------------------------------------------------------------------- products

# How a product is computed: a schedule, and what it keeps. Each evaluation makes it again, because
# an open prefetcher must not see a weight change.
How = Callable[[Axes], tuple[summa.Schedule, summa.KeepGathered]]


def _gather(
    axes: Axes, keep_input: bool = False, keep_weight: bool = False, parts: int = 1
) -> tuple[Any, Any]:
    cell = summa.WeightPrefetcher()
    cell.open()
    keep = summa.KeepGathered(keep_input, cell if keep_weight else None)
    return summa.ChunkedGather(axes, Sharded(axes.col, -1), parts), keep


SCHEDULES: dict[str, How] = {
    "broadcast": lambda axes: (summa.Broadcast(axes), summa.KeepGathered()),
    "pipelined": lambda axes: (summa.Pipelined(axes), summa.KeepGathered()),
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
        schedule, keep = how(axes)
        mine = cut(a, (ROW, None, COL), axes), cut(w, (ROW, COL), axes)
        my_bias = _bias(bias[0], axes) if bias else None
        c = summa.product_ab(*mine, schedule, my_bias, keep)
        return join(c, (ROW, None, COL), axes)

    def plain(a: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        return a @ w + _per_row(bias, b)

    return Case([(b, s, k), (k, n), *[(axes.row.size, n)] * has_bias], on_grid, plain)


def product_abt(how: How, has_bias: bool, sizes: tuple[int, ...], axes: Axes) -> Case:
    b, s, k, n = sizes

    def on_grid(a: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        schedule, keep = how(axes)
        mine = cut(a, (ROW, None, COL), axes), cut(w, (ROW, COL), axes)
        my_bias = _bias(bias[0], axes) if bias else None
        c = summa.product_abt(*mine, schedule, my_bias, keep)
        return join(c, (ROW, None, COL), axes)

    def plain(a: Tensor, w: Tensor, *bias: Tensor) -> Tensor:
        return a @ w.t() + _per_row(bias, b)

    return Case([(b, s, k), (n, k), *[(axes.row.size, n)] * has_bias], on_grid, plain)


def _per_row(bias: tuple[Tensor, ...], b: int) -> Tensor | float:
    """Return a bias for each of b sequences, from one for each row of the grid."""
    if not bias:
        return 0.0
    return bias[0].repeat_interleave(b // len(bias[0]), 0).unsqueeze(1)


def product_atb(how: How, sizes: tuple[int, ...], axes: Axes) -> Case:
    k, m, n = sizes

    def on_grid(a: Tensor, b: Tensor) -> Tensor:
        mine = cut(a, (ROW, COL), axes), cut(b, (ROW, COL), axes)
        return join(summa.product_atb(*mine, how(axes)[0]), (ROW, COL), axes)

    return Case([(k, m), (k, n)], on_grid, lambda a, b: a.t() @ b)


def one_operand_wanted(wanted: int, product: Callable[..., Case], how: How, axes: Axes) -> Case:
    """A product whose other operand needs no gradient, so that its half of backward is skipped."""
    both = product(how, False, (2, 2, 6, 6), axes)
    generator = torch.Generator().manual_seed(4)
    constant = torch.randn(both.shapes[1 - wanted], generator=generator, dtype=torch.float64)

    def of_one(function: Callable[..., Tensor], x: Tensor) -> Tensor:
        return function(x, constant) if wanted == 0 else function(constant, x)

    return Case([both.shapes[wanted]], partial(of_one, both.on_grid), partial(of_one, both.plain))


def normed_ab(how: How, sizes: tuple[int, ...], axes: Axes) -> Case:
    """LayerNorm, then a product. Each device's norm parameters are one variable."""
    b, s, k, n = sizes
    rows, cols, eps = axes.row.size, axes.col.size, 1e-1

    def on_grid(x: Tensor, scale: Tensor, shift: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        schedule, keep = how(axes)
        mine = [cut(vector, (*EACH, None), axes)[0, 0] for vector in (scale, shift)]
        a = summa.Normed(cut(x, (ROW, None, COL), axes), summa.Norm(mine[0], mine[1], eps))
        c = summa.product_ab(a, cut(w, (ROW, COL), axes), schedule, _bias(bias, axes), keep)
        return join(c, (ROW, None, COL), axes)

    def plain(x: Tensor, scale: Tensor, shift: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        blocks = [
            torch.cat(
                [
                    F.layer_norm(part, (k,), scale[i, j], shift[i, j], eps) @ columns
                    for j, columns in enumerate(w.chunk(cols, 1))
                ],
                -1,
            )
            for i, part in enumerate(x.chunk(rows))
        ]
        return torch.cat(blocks) + _per_row((bias,), b)

    return Case([(b, s, k), (rows, cols, k), (rows, cols, k), (k, n), (rows, n)], on_grid, plain)


def lookup(how: How, output_stays: bool, v: int, h: int, n_tokens: int, axes: Axes) -> Case:
    """Look up rows of a table [v, h], or of one stored as [h, v].

    The tokens differ between the rows, and some words occur twice.
    """
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, v, (axes.row.size, n_tokens, 2), generator=generator)
    tokens[:, :, 0] = v - 1
    tokens[:, 0, 1] = 0

    def on_grid(table: Tensor) -> Tensor:
        schedule, keep = how(axes)
        mine = tokens[axes.row.index], cut(table, (ROW, COL), axes)
        rows = summa.lookup(*mine, schedule, axes, output_stays, keep)
        return join(rows.unsqueeze(0), (ROW, None, None, COL), axes)

    if output_stays:
        return Case([(v, h)], on_grid, lambda table: F.embedding(tokens, table))
    return Case([(h, v)], on_grid, lambda table: F.embedding(tokens, table.t()))


# --------------------------------------------------------------------------- Megatron's sections

# On one row of devices, activations between sections are whole on all of them, or sharded over s,
# or over b as with sub-graphs; they are gathered at once or in chunks.
BETWEEN: dict[str, Dims] = {
    "replicated": (None, None, None),
    "sequence": (None, COL, None),
    "sequence-parts": (None, COL, None),
    "samples-parts": (COL, None, None),
}


def _one_row(between: str, axes: Axes) -> summa.Gather:
    dims, parts = BETWEEN[between], 2 if between.endswith("parts") else 1
    boundary = Sharded(axes.col, dims.index(COL)) if COL in dims else Replicated(axes.col)
    return summa.ChunkedGather(axes, boundary, parts)


def section_opens(between: str, keep_input: bool, axes: Axes) -> Case:
    """C = A B + bias: A is whole or sharded over s; the columns of B, bias and C are sharded."""
    keep = summa.KeepGathered(keep_input)

    def on_grid(a: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        mine = cut(a, BETWEEN[between], axes), cut(w, (None, COL), axes)
        my_bias = cut(bias, (COL,), axes)
        c = summa.product_ab(*mine, _one_row(between, axes), my_bias, keep)
        return join(c, (None, None, COL), axes)

    cols = axes.col.size
    shapes: list[tuple[int, ...]] = [(cols, cols, 3), (3, 2 * cols), (2 * cols,)]
    return Case(shapes, on_grid, lambda a, w, bias: a @ w + bias)


def section_closes(between: str, axes: Axes) -> Case:
    """C = A Bᵀ + bias: A and the columns of B are sharded, C is whole or sharded over s or b.

    The bias is one variable that all devices hold, or one on each device, which sees its part of C.
    """
    cols, whole = axes.col.size, between == "replicated"

    def on_grid(a: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        mine = cut(a, (None, None, COL), axes), cut(w, (None, COL), axes)
        my_bias = cut(bias, (None if whole else COL, None), axes)[0]
        c = summa.product_abt(*mine, _one_row(between, axes), my_bias)
        return join(c, BETWEEN[between], axes)

    def plain(a: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        each = bias.unsqueeze(1) if between.startswith("samples") else bias
        return a @ w.t() + each

    shapes: list[tuple[int, ...]] = [(cols, cols, 2 * cols), (3, 2 * cols)]
    return Case([*shapes, (1 if whole else cols, 3)], on_grid, plain)


def section_lookup(between: str, axes: Axes) -> Case:
    """Look up rows of a table [h, v] with sharded words, for tokens that all devices know."""
    cols = axes.col.size
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 2 * cols, (2, 2 * cols), generator=generator)

    def on_grid(table: Tensor) -> Tensor:
        mine = cut(table, (None, COL), axes)
        rows = summa.lookup(tokens, mine, _one_row(between, axes), axes, output_stays=False)
        return join(rows, BETWEEN[between], axes)

    return Case([(3, 2 * cols)], on_grid, lambda table: F.embedding(tokens, table.t()))


# --------------------------------------------------------------------------- norm and loss


def layer_norm(h: int, eps: float, offset: float, axes: Axes) -> Case:
    """Each row's copies of the weights count as one variable: their gradients are partial sums."""
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
    """A row of devices computes its tokens' loss, which is one variable that all of them hold."""
    rows = axes.row.size
    generator = torch.Generator().manual_seed(2)
    targets = torch.randint(0, v, (rows, 2, 2), generator=generator)
    targets[:, 0, 0] = v - 1
    targets[-1, 1, 1] = IGNORE
    loss: nn.Module = VocabParallelCrossEntropy(axes.col, v)

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


def products_of(rows: int, cols: int) -> dict[str, CaseMaker]:
    """M, K and N differ, and panels are at least two wide, except on 3x4 to save time."""
    both = math.lcm(rows, cols) * (1 if rows * cols > 9 else 2)
    ab, abt, atb = (rows, 2, both, 2 * cols), (rows, 2, 2 * cols, both), (2 * rows, both, 2 * cols)
    makers: dict[str, CaseMaker] = {
        "product_ab-gather": partial(product_ab, _gather, False, ab),
        "product_abt-gather": partial(product_abt, _gather, False, abt),
    }
    for name, how in {**SCHEDULES, **KEEPS}.items():
        makers[f"product_ab-{name}-bias"] = partial(product_ab, how, True, ab)
        if name in SCHEDULES:
            makers[f"product_atb-{name}"] = partial(product_atb, how, atb)
        # the other schedules ignore what is kept
        if name in SCHEDULES or name == "gather-keep_weight":
            makers[f"product_abt-{name}-bias"] = partial(product_abt, how, True, abt)
            makers[f"lookup-output_stays-{name}"] = partial(lookup, how, True, both, 2 * cols, 2)
            makers[f"lookup-input_stays-{name}"] = partial(lookup, how, False, 2 * cols, both, 2)
        if name not in ("broadcast", "pipelined"):
            makers[f"normed_ab-{name}"] = partial(normed_ab, how, ab)
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


def sections() -> dict[str, CaseMaker]:
    """Return Megatron's products, on one row of devices."""
    makers: dict[str, CaseMaker] = {}
    for between in BETWEEN:
        makers[f"section_opens-{between}"] = partial(section_opens, between, False)
        makers[f"section_opens-{between}-keep_input"] = partial(section_opens, between, True)
        makers[f"section_closes-{between}"] = partial(section_closes, between)
        if not between.startswith("samples"):  # with sharded samples the embedding is common
            makers[f"section_lookup-{between}"] = partial(section_lookup, between)
    return makers


def norm_and_loss_of(rows: int, cols: int) -> dict[str, CaseMaker]:
    return {
        "layer_norm-one-column-each": partial(layer_norm, cols, 1e-5, 0.0),
        "layer_norm": partial(layer_norm, 2 * cols, 1e-1, 3.0),
        "cross_entropy": partial(cross_entropy, 3 * cols, 3 * cols),
        "cross_entropy-padded": partial(cross_entropy, 3 * cols - 1, 3 * cols),
        "cross_entropy-rank-of-padding": partial(cross_entropy, 2 * cols - 1, 3 * cols),
    }


MAKERS = {(r, c): {**products_of(r, c), **norm_and_loss_of(r, c)} for r, c in GRIDS}
for r, c in GRIDS:
    if r * c <= 9:  # they run over one axis, so 3x4 would only repeat others
        MAKERS[r, c] |= collectives_of(r, c)
MAKERS[1, 3] |= sections()
MAKERS[2, 3] |= one_wanted()
CASES = [(grid, name) for grid, makers in MAKERS.items() for name in makers]


# On 2x3 these combine chunks and kept operands in ways that other products there have.
REPEATED = {
    "lookup-input_stays-gather-parts",
    "lookup-input_stays-gather-keep_weight",
    "normed_ab-gather-parts",
    "normed_ab-gather-keep_weight",
    "normed_ab-gather-parts-keep_weight",
    "product_ab-gather-parts-keep_weight-bias",
    "product_abt-gather-parts-only_a_wanted",
    "product_abt-gather-parts-only_b_wanted",
}


def smaller(case: tuple[tuple[int, int], str]) -> bool:
    """Accept nearly all cases on 2x3, those that only one row has, and elsewhere few."""
    grid, name = case
    if grid == (2, 3):
        return name not in REPEATED
    if "section" in name:
        return True
    if grid in ((1, 3), (3, 1)):
        words = ("keep", "parts", "lookup", "cross", "pipelined", "broadcast")
        return not any(word in name for word in words)
    if grid == (3, 2):
        return "product" in name and name.endswith("gather-bias")
    if grid == (2, 2):
        return "product" in name and name.endswith("broadcast-bias")
    return name.endswith(("product_abt-pipelined-bias", "layer_norm"))


def check_on_rank(grid: tuple[int, int], name: str) -> None:
    """Check a case; the work of one rank."""
    check(MAKERS[grid][name](grid_axes(*grid)))


@pytest.mark.parametrize(
    "case", full_unless(smaller, CASES), ids=[f"{r}x{c}-{name}" for (r, c), name in CASES]
)
def test_gradients_equal_finite_differences(
    pool: WorkerPool, case: tuple[tuple[int, int], str]
) -> None:
    grid, name = case
    pool.run(math.prod(grid), check_on_rank, grid, name)


# --------------------------------------------------------------------------- over NCCL's path


def makers_on_nccl(rows: int, cols: int) -> dict[str, CaseMaker]:
    found = {**products_of(rows, cols), **collectives_of(rows, cols)}
    return found | (sections() if rows == 1 else {})


GRIDS_ON_NCCL = [(2, 1), (1, 2), (2, 2), (2, 3)]
QUICK_ON_NCCL = {
    "product_ab-gather-bias",
    "product_abt-gather-keep_weight-bias",
    "product_atb-gather",
    "product_atb-gather-parts",
    "lookup-output_stays-gather",
    "lookup-input_stays-gather",
    "normed_ab-gather-keep_all",
}
ON_NCCL = [(grid, name) for grid in GRIDS_ON_NCCL for name in makers_on_nccl(*grid)]


def check_on_rank_on_nccl(grid: tuple[int, int], name: str) -> None:
    on_nccl(check, makers_on_nccl(*grid)[name](grid_axes(*grid)))


@pytest.mark.parametrize(
    "case",
    full_unless(lambda case: case[1] in QUICK_ON_NCCL, ON_NCCL),
    ids=[f"{r}x{c}-{name}" for (r, c), name in ON_NCCL],
)
def test_gradients_over_nccl_equal_finite_differences(
    pool: WorkerPool, case: tuple[tuple[int, int], str]
) -> None:
    """Whole operands and sums take another path there (tests/support/multirank/nccl_path.py)."""
    grid, name = case
    pool.run(math.prod(grid), check_on_rank_on_nccl, grid, name)
