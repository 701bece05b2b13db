"""Autograd collectives and 2-D operations compute what one process computes, on real processes.

Each case is a function of whole tensors, computed by the grid between `cut` and `join`. Its value
and its gradient must equal those of the plain computation, element by element. Some cases are also
checked against finite differences (all ranks perturb the same element at the same time);
`make test-all` does so with all of them.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from gridformer import comm
from gridformer.comm import Recorder, autograd, record_messages
from gridformer.mesh import Axes, Axis
from tests.support.marks import full_unless
from tests.support.multirank.cutting import (
    COL,
    EACH,
    ROW,
    Case,
    CaseMaker,
    Dims,
    check,
    check_differences,
    cut,
    grid_axes,
    join,
)
from tests.support.multirank.gradcheck_cases import (
    collectives_of,
    experts_of,
    experts_on_one,
    norm_and_loss_of,
    one_wanted,
    products_of,
    sections,
    stationary_weights,
)
from tests.support.multirank.nccl_path import Over, on_both_paths, on_nccl
from tests.support.multirank.pool import WorkerPool

GRIDS = [(1, 3), (3, 1), (2, 2), (2, 3), (3, 2), (3, 4)]

MAKERS = {
    (r, c): {**products_of(r, c), **stationary_weights(r, c), **norm_and_loss_of(r, c)}
    for r, c in GRIDS
}
for r, c in GRIDS:
    if r * c <= 9:  # they run over one axis, so 3x4 would only repeat others
        MAKERS[r, c] |= {**collectives_of(r, c), **experts_of(r, c)}
MAKERS[1, 3] |= sections()
MAKERS[2, 2] |= experts_on_one()
MAKERS[2, 3] |= one_wanted()
CASES = [(grid, name) for grid, makers in MAKERS.items() for name in makers]


# On 2x3 these combine chunks and kept operands in ways that other products there have.
REPEATED = {
    "lookup-input_stationary-gather-parts",
    "lookup-input_stationary-gather-keep_weight",
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
        return name.endswith("broadcast-bias") or name.startswith(("experts", "sorted"))
    return name.endswith(("product_abt-pipelined-bias", "_norm"))


# A few of them are checked against finite differences in every run of the tests.
DIFFERENCES = {
    "product_ab-gather-parts-bias", "product_abt-broadcast-bias",
    "product_ab-gather-keep_all-bias", "product_stationary-s", "allreduce_identity-col",
    "allreduce_allreduce", "attention_over_rows-causal-chunks", "cross_entropy",
    "experts_rows-row", "experts_rows-col", "experts_product-row-1", "experts_product-col-2",
    "experts_product", "sorted-2",
}  # fmt: skip


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
    "case", full_unless(lambda case: case[0] == (2, 2) and case[1] in DIFFERENCES, CASES), ids=title
)
def test_gradients_equal_finite_differences(
    pool: WorkerPool, case: tuple[tuple[int, int], str]
) -> None:
    grid, name = case
    pool.run(math.prod(grid), on_rank, grid, name, differences=True)


# --------------------------------------------------- over NCCL's path


def makers_on_nccl(rows: int, cols: int) -> dict[str, CaseMaker]:
    found = {**products_of(rows, cols), **collectives_of(rows, cols)}
    found |= stationary_weights(rows, cols)
    return found | (sections() if rows == 1 else {})


GRIDS_ON_NCCL = [(2, 1), (1, 2), (2, 2), (2, 3)]
QUICK_ON_NCCL = {
    "product_ab-gather-bias", "product_abt-gather-keep_weight-bias",
    "lookup-output_stationary-gather", "lookup-input_stationary-gather", "product_stationary-s",
    "section_opens-sequence-hidden", "section_closes-sequence-hidden",
    "section_closes-replicated-hidden", "attention_over_rows-causal-chunks",
}  # fmt: skip
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


# --------------------------------------------------- messages that differ in size

AXES = [(1, 4, COL), (2, 2, ROW), (3, 2, COL)]


def piece(source: int, target: int, line: int) -> Tensor:
    """Return a piece of unequal shape, often empty, and non-contiguous if possible."""
    shape = [(source, target + 1), (2, target, source), (0, 3), (4,)][(source + 2 * target) % 4]
    generator = torch.Generator().manual_seed(100 * line + 10 * source + target)
    return torch.randn(shape[::-1], generator=generator).permute(*range(len(shape) - 1, -1, -1))


def line_of(axes: Axes, name: str) -> int:
    """Return which of an axis's parallel groups this rank is in."""
    return axes.row.index if name == COL else axes.col.index


def only(recorder: Recorder, op: str, axis: Axis) -> comm.Record:
    (found,) = recorder.records
    assert (found.op, found.axis, found.size, found.label) == (op, axis.name, axis.size, "why")
    return found


def equal(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    assert torch.equal(got, want)


def exchanged_by_all_to_all(rows: int, cols: int, name: str) -> None:
    axes = grid_axes(rows, cols)
    axis, line = axes[name], line_of(axes, name)
    here, others = axis.index, range(axis.size)
    sent = [piece(here, i, line) for i in others]
    wanted = [piece(i, here, line) for i in others]
    with record_messages() as recorder:
        got = comm.all_to_all(sent, [x.shape for x in wanted], axis, "why")
    for mine, want in zip(got, wanted):
        equal(mine, want)
    numbers = [sum(p.numel() for i, p in enumerate(x) if i != here) for x in (sent, wanted)]
    assert only(recorder, "all_to_all", axis).moved == max(numbers)
    empty = [torch.zeros(0, 2) if i != here else torch.ones(3) for i in others]
    back = comm.all_to_all(empty, [x.shape for x in empty], axis)
    assert [x.numel() for x in back] == [3 if i == here else 0 for i in others]


def scattered_and_gathered(rows: int, cols: int, name: str) -> None:
    axes = grid_axes(rows, cols)
    axis, line = axes[name], line_of(axes, name)
    here, others = axis.index, range(axis.size)
    for root in others:
        pieces = [piece(root, i, line) for i in others]
        mine = pieces[here]
        far = sum(p.numel() for i, p in enumerate(pieces) if i != root)
        out = torch.full(mine.shape, torch.nan)
        with record_messages() as recorder:
            got = comm.scatter(pieces if here == root else None, out, axis, root, "why")
        assert got is out
        equal(got, mine)
        found = only(recorder, "scatter", axis)
        assert found.moved == (far if here == root else mine.numel())
        assert found.targets == (axis.ranks if here == root else ())

        shapes = [p.shape for p in pieces]
        with record_messages() as recorder:
            gathered = comm.gather(mine, shapes, axis, root, "why")
        found = only(recorder, "gather", axis)
        assert found.moved == (far if here == root else mine.numel())
        assert found.targets == (axis.ranks[root],)
        assert (gathered is None) == (here != root)
        for part, want in zip(gathered or [], pieces):
            equal(part, want)


def exchanged(rows: int, cols: int, name: str) -> None:
    """Messages go in a circle, to oneself and one way only; the last rank takes no part."""
    axes = grid_axes(rows, cols)
    axis, line = axes[name], line_of(axes, name)
    here, n = axis.index, axis.size - 1
    pairs = {(i, (i + 1) % n) for i in range(n)} | {(0, i) for i in range(n)} | {(n - 1, n - 1)}
    sends = {j: piece(i, j, line) for i, j in pairs if i == here}
    wanted = {i: piece(i, j, line) for i, j in pairs if j == here}
    receives = {i: torch.full(x.shape, torch.nan) for i, x in wanted.items()}
    with record_messages() as recorder:
        comm.exchange(sends, receives, axis, "why")
    if here == n:
        assert not recorder.records
        return
    for i, got in receives.items():
        equal(got, wanted[i])
    numbers = [sum(p.numel() for i, p in x.items() if i != here) for x in (sends, receives)]
    found = only(recorder, "exchange", axis)
    assert found.moved == max(numbers)
    assert set(found.targets) == {axis.ranks[j] for j in sends}


@on_both_paths
@pytest.mark.parametrize("what", [exchanged_by_all_to_all, scattered_and_gathered, exchanged])
@pytest.mark.parametrize(("rows", "cols", "name"), AXES, ids=lambda part: str(part))
def test_pieces_of_any_shape_arrive(
    pool: WorkerPool, rows: int, cols: int, name: str, what: Callable[..., None], over: Over
) -> None:
    """Pieces are unequal, sometimes empty, from every root, in several groups at once."""
    pool.run(rows * cols, *over, what, rows, cols, name)


def test_one_rank_keeps_what_it_has() -> None:
    """One rank initializes nothing, and nothing is counted."""
    axis, x = Axis("col"), torch.arange(3.0)
    with record_messages() as recorder:
        (kept,) = comm.all_to_all([x], [x.shape], axis)
        scattered = comm.scatter([x], torch.zeros(3), axis, 0)
        gathered = comm.gather(x, [x.shape], axis, 0)
        into = torch.zeros(3)
        comm.exchange({0: x}, {0: into}, axis)
    assert gathered is not None
    for got in (kept, scattered, gathered[0], into):
        equal(got, x)
    assert recorder.moved() == 0


# --------------------------------------------------- autograd pairs


class _Lent(torch.autograd.Function):
    """Uses only the first device's variable: x there, on the meta device elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: bool) -> Tensor:
        ctx.first = first
        return x.clone() if first else x.to("meta")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        assert grads[0].is_meta != ctx.first
        return grads[0] if ctx.first else torch.zeros(grads[0].shape, dtype=grads[0].dtype), None


class _Returned(torch.autograd.Function):
    """Returns zeros for meta tensors, which all devices except the first must have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: bool) -> Tensor:
        ctx.first = first
        assert x.is_meta != first
        return x.clone() if first else torch.zeros(x.shape, dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] if ctx.first else grads[0].to("meta"), None


def _over(name: str) -> int:
    return 0 if name == ROW else 1


def alltoall(name: str, split: int, joined: int, axes: Axes) -> Case:
    """Move the sharding of a tensor from one dimension to another."""
    other = COL if name == ROW else ROW
    shape = [2, 3, 2]
    for dim in {split, joined}:
        shape[dim] *= axes[name].size

    def lying(dim: int) -> Dims:
        dims: list[str | None] = [other, None, None, None]
        dims[dim + 1] = name
        return tuple(dims)

    def on_grid(x: Tensor) -> Tensor:
        mine = cut(x, lying(joined), axes).squeeze(0)
        out = autograd.alltoall(mine, axes[name], split, joined, "slice")
        return join(out.unsqueeze(0), lying(split), axes)

    return Case([(axes[other].size, *shape)], on_grid, lambda x: x.clone())


def scatter_gather(name: str, dim: int, axes: Axes) -> Case:
    """Scatter the first device's variable to all devices."""
    axis = axes[name]
    shape = [2, 3, 2]
    shape[dim] *= axis.size

    def on_grid(x: Tensor) -> Tensor:
        mine = _Lent.apply(cut(x, (*EACH, None, None, None), axes)[0, 0], axis.index == 0)
        part = autograd.scatter_gather(mine, axis, dim, torch.device("cpu"))
        return join(part[None, None], (*EACH, None, None, None), axes)

    def plain(x: Tensor) -> Tensor:
        parts = x.select(_over(name), 0).chunk(axis.size, dim + 1)
        return torch.stack(parts, _over(name))

    return Case([(axes.row.size, axes.col.size, *shape)], on_grid, plain)


def gather_scatter(name: str, dim: int, axes: Axes) -> Case:
    """Gather one variable per device on the first device."""
    axis = axes[name]

    def on_grid(x: Tensor) -> Tensor:
        mine = cut(x, (*EACH, None, None, None), axes)[0, 0]
        whole = autograd.gather_scatter(mine, axis, dim)
        back = _Returned.apply(whole, axis.index == 0)
        return join(back[None, None], (*EACH, None, None, None), axes)

    def plain(x: Tensor) -> Tensor:
        whole = torch.cat(x.unbind(_over(name)), dim + 1)
        zeros = [torch.zeros_like(whole)] * (axis.size - 1)
        return torch.stack([whole, *zeros], _over(name))

    return Case([(axes.row.size, axes.col.size, 2, 3, 2)], on_grid, plain)


def cases_of(name: str) -> dict[str, Callable[[Axes], Case]]:
    made: dict[str, Callable[[Axes], Case]] = {}
    for split, joined in ((-1, 0), (0, -1), (1, 0)):
        dims = split % 3, joined % 3
        made[f"alltoall {split} {joined}"] = partial(alltoall, name, *dims)
    for dim in (0, 2):
        made[f"scatter_gather {dim}"] = partial(scatter_gather, name, dim)
        made[f"gather_scatter {dim}"] = partial(gather_scatter, name, dim)
    return made


def pairs_on_rank(rows: int, cols: int, name: str) -> None:
    torch.set_num_threads(1)
    axes = grid_axes(rows, cols)
    for title, maker in cases_of(name).items():
        try:
            check_differences(maker(axes))
        except Exception as error:
            raise AssertionError(f"{title}: {error}") from error


@pytest.mark.parametrize(("rows", "cols", "name"), [(1, 3, COL), (2, 2, ROW), (3, 2, COL)])
def test_pieces_gradients_equal_finite_differences(
    pool: WorkerPool, rows: int, cols: int, name: str
) -> None:
    """Check all-to-all, scatter and gather with their transposes; only the first rank counts."""
    pool.run(math.prod((rows, cols)), pairs_on_rank, rows, cols, name)
