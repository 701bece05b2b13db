"""Where SUPER for transformers, D&SP and D&SP-cSub, places ranks, branches and common layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gridformer.config import LayoutConfig
from gridformer.models import build_model
from gridformer.parallel import build_parallel
from tests.support.marks import full_unless
from tests.support.multirank.exactness import (
    CPU,
    axes_of,
    tiny,
)
from tests.support.multirank.layouts import KINDS, Layout, in_branches, subgraph
from tests.support.multirank.pool import WorkerPool

# --------------------------------------------------------------------------- placement


def places(layout: Layout) -> dict[str, tuple[int, tuple[int, ...]]]:
    axes = axes_of(LayoutConfig(**layout))
    names = ("branch", "dp", "dp_branch", "batch", "same_batch")
    return {name: (axes[name].index, axes[name].ranks) for name in names}


@pytest.mark.parametrize("order", ["topology", "contiguous"])
@pytest.mark.parametrize("common", ["all", "first"])
def test_ranks_lie_in_the_order_asked_for(pool: WorkerPool, order: str, common: str) -> None:
    """Process x of sub-grid y has rank x g + y, or contiguously y n/g + x."""
    g, dp = 2, 3
    for rank, found in enumerate(pool.run(6, places, subgraph(g, dp, order=order, common=common))):
        x, y = divmod(rank, g) if order == "topology" else divmod(rank, dp)[::-1]

        def at(x: int, y: int) -> int:
            return x * g + y if order == "topology" else y * dp + x

        assert found["branch"] == (y, tuple(at(x, i) for i in range(g)))
        assert found["dp"] == (x, tuple(at(i, y) for i in range(dp)))
        index, ranks = found["dp_branch"]
        assert set(ranks) == set(range(g * dp))
        assert ranks[index] == rank, "what is kept of a gather or sent by a root goes by index"
        assert (index == 0) == (rank == 0), "which counts norms, and belongs to the first sub-grid"
        shared, alone = ("batch", "same_batch") if common == "all" else ("same_batch", "batch")
        assert found[shared] == found["branch"]
        assert found[alone][0] == 0
        assert len(found[alone][1]) == 1


def held(layout: Layout, model: dict[str, Any]) -> tuple[bool, dict[str, int]]:
    """Return whether this rank is in the first sub-grid, and its elements by parameter."""
    plan = LayoutConfig(**layout)
    axes = axes_of(plan)
    cut = build_parallel(tiny(**model), plan, axes, 1, CPU)
    assert not any(p.is_meta for p in cut.parameters())
    return axes.branch.index == 0, {name: p.numel() for name, p in cut.named_parameters()}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind.values()))
@pytest.mark.parametrize("branches", full_unless(lambda n: n == 3, [2, 3]))
def test_branches_are_held_once_and_common_layers_where_they_belong(
    pool: WorkerPool, branches: int, kind: Layout
) -> None:
    """A process holds 1/g of every branch parameter, and common ones as the layout says."""
    model = {"n_labels": 3}
    with torch.device("meta"):
        whole = {name: p.numel() for name, p in build_model(tiny(**model)).named_parameters()}
    layout = subgraph(branches, **kind)
    for first, found in pool.run(branches, held, layout, model):
        want = {n: size // branches for n, size in whole.items() if in_branches(n, layout)}
        if first or kind["common"] == "all":
            want |= {name: size for name, size in whole.items() if name not in want}
        assert found == want
        assert all(whole[name] % branches == 0 for name in want if in_branches(name, layout))
