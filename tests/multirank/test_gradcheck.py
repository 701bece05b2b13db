"""Autograd collectives and 2-D operations compute what one process computes, on real processes.

Each case is a function of whole tensors, computed by the grid between `cut` and `join`. Its value
and its gradient must equal those of the plain computation, element by element. Some cases are also
checked against finite differences (all ranks perturb the same element at the same time);
`make test-all` does so with all of them.
"""

from __future__ import annotations

import math

import pytest

from tests.support.marks import full_unless
from tests.support.multirank.collective_cases import CaseMaker, collectives_of
from tests.support.multirank.cutting import check, check_differences, grid_axes
from tests.support.multirank.nccl_path import on_nccl
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.product_cases import one_wanted, products_of
from tests.support.multirank.section_cases import norm_and_loss_of, sections

GRIDS = [(1, 3), (3, 1), (2, 2), (2, 3), (3, 2), (3, 4)]

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
    return name.endswith(("product_abt-pipelined-bias", "_norm"))


# A few of them are checked against finite differences in every run of the tests.
DIFFERENCES = {
    "product_ab-gather-parts-bias",
    "product_abt-broadcast-bias",
    "product_ab-gather-keep_all-bias",
    "allreduce_identity-col",
    "cross_entropy",
}


def title(case: tuple[tuple[int, int], str]) -> str:
    (rows, cols), name = case
    return f"{rows}x{cols}-{name}"


def on_rank(grid: tuple[int, int], name: str, differences: bool = False) -> None:
    """Check a case; the work of one rank."""
    (check_differences if differences else check)(MAKERS[grid][name](grid_axes(*grid)))


@pytest.mark.parametrize("case", [case for case in CASES if smaller(case)], ids=title)
def test_equals_one_process(pool: WorkerPool, case: tuple[tuple[int, int], str]) -> None:
    grid, name = case
    pool.run(math.prod(grid), on_rank, grid, name)


@pytest.mark.parametrize(
    "case",
    full_unless(lambda case: case[0] == (2, 2) and case[1] in DIFFERENCES, CASES),
    ids=title,
)
def test_gradients_equal_finite_differences(
    pool: WorkerPool, case: tuple[tuple[int, int], str]
) -> None:
    grid, name = case
    pool.run(math.prod(grid), on_rank, grid, name, differences=True)


# --------------------------------------------------------------------------- over NCCL's path


def makers_on_nccl(rows: int, cols: int) -> dict[str, CaseMaker]:
    found = {**products_of(rows, cols), **collectives_of(rows, cols)}
    return found | (sections() if rows == 1 else {})


GRIDS_ON_NCCL = [(2, 1), (1, 2), (2, 2), (2, 3)]
QUICK_ON_NCCL = {
    "product_ab-gather-bias",
    "product_abt-gather-keep_weight-bias",
    "lookup-output_stays-gather",
    "lookup-input_stays-gather",
}
ON_NCCL = [(grid, name) for grid in GRIDS_ON_NCCL for name in makers_on_nccl(*grid)]


def on_rank_over_nccl(grid: tuple[int, int], name: str, differences: bool) -> None:
    checked = check_differences if differences else check
    on_nccl(checked, makers_on_nccl(*grid)[name](grid_axes(*grid)))


@pytest.mark.parametrize(
    "case", full_unless(lambda case: case[1] in QUICK_ON_NCCL, ON_NCCL), ids=title
)
def test_equals_one_process_over_nccl(pool: WorkerPool, case: tuple[tuple[int, int], str]) -> None:
    """Whole operands and sums take another path there (tests/support/multirank/nccl_path.py).

    The cases that only `make test-all` runs are also checked against finite differences.
    """
    grid, name = case
    pool.run(math.prod(grid), on_rank_over_nccl, grid, name, name not in QUICK_ON_NCCL)
