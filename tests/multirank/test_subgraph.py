"""SUPER for transformers, D&SP and D&SP-cSub: every layout trains exactly as one device.

test_subgraph_volumes.py counts what is sent, test_gradient_sums.py tests sums of gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gridformer import comm
from gridformer.config import LayoutConfig
from gridformer.mesh import Axes
from gridformer.models import Model, build_model
from gridformer.parallel import build_parallel
from gridformer.parallel.data.copies import assert_copies_equal, share_copies
from gridformer.parallel.data.gradients import owned, reduce_gradients
from tests.support.marks import full_unless
from tests.support.multirank.exactness import (
    CPU,
    EVERYTHING,
    TOLERANCE,
    TRAIN,
    axes_of,
    batch_of,
    compare,
    distance,
    gradients,
    tiny,
    values,
)
from tests.support.multirank.layouts import KINDS, Layout, in_branches, n_of, short, subgraph
from tests.support.multirank.pool import WorkerPool

PLAIN = KINDS[0]

# Settings vary as much as layouts: each value meets most of the others' values at least once.
CASES: list[tuple[Layout, dict[str, Any]]] = [
    *((subgraph(2, **kind), {"micro_batches": 2}) for kind in KINDS),
    (subgraph(3, **KINDS[2], keep_gathered="inputs"), {"micro_batches": 2}),
    (subgraph(3, **KINDS[4], keep_gathered="none"), {}),
    *((subgraph(2, 2, **kind, order="contiguous"), {}) for kind in KINDS),
    (subgraph(2, 2, **KINDS[0], keep_gathered="inputs"), {"micro_batches": 3}),
    (subgraph(2, 2, **KINDS[4], keep_gathered="inputs"), {"micro_batches": 3}),
    (subgraph(2, 2, **KINDS[6]), {"micro_batches": 2}),
    (subgraph(4, **KINDS[0], keep_gathered="none"), {"micro_batches": 3}),
    (subgraph(4, **KINDS[5], keep_gathered="inputs"), {"micro_batches": 2}),
    (subgraph(4, **KINDS[7]), {"micro_batches": 3}),
    (subgraph(3, 2, **KINDS[3], order="contiguous"), {}),
    (subgraph(3, 2, **KINDS[6], keep_gathered="none"), {"micro_batches": 2}),
    (subgraph(4, 2, **KINDS[2], keep_gathered="inputs"), {"micro_batches": 3}),
    (subgraph(4, 2, **KINDS[4], order="contiguous", keep_gathered="none"), {}),
]


def check(
    pool: WorkerPool, layout: Layout, model: dict[str, Any], n_steps: int = 2, **train: Any
) -> None:
    settings = {**TRAIN, **train}
    layout = {**layout, "micro_batches": settings.pop("micro_batches", 1)}
    limit = TOLERANCE[settings.get("dtype", "float32")]
    for rank, worst in enumerate(pool.run(n_of(layout), compare, layout, model, settings, n_steps)):
        assert worst["init"] == 0.0, f"rank {rank}: initial weights depend on the layout"
        wrong = {k: v for k, v in worst.items() if not v <= limit}
        assert not wrong, f"rank {rank}: {wrong}"


@pytest.mark.parametrize(
    ("layout", "train"), full_unless(lambda case: case in CASES[::4], CASES, unpack=True), ids=short
)
def test_equals_one_device(pool: WorkerPool, layout: Layout, train: dict[str, Any]) -> None:
    """Dropout is on everywhere, so masks must not depend on the layout either."""
    check(pool, layout, {**EVERYTHING, "n_layers": 2}, dtype="float64", **train)


@pytest.mark.parametrize(
    "layout",
    [subgraph(2, **KINDS[6]), subgraph(2, 2, **KINDS[0]), subgraph(4, **KINDS[4])],
    ids=short,
)
def test_equals_one_device_in_float32(pool: WorkerPool, layout: Layout) -> None:
    check(pool, layout, {"max_seq_len": 12}, n_steps=3, dtype="float32")


@pytest.mark.parametrize(
    "kind",
    full_unless(lambda kind: kind in KINDS[::5], KINDS),
    ids=lambda kind: "-".join(kind.values()),
)
def test_bfloat16_stays_close_to_one_device(pool: WorkerPool, kind: Layout) -> None:
    """Rounding to 8 bits happens in other places, so loss and norm are compared loosely."""
    settings = {**TRAIN, "dtype": "bfloat16"}
    for worst in pool.run(2, compare, subgraph(2, **kind), {"max_seq_len": 12}, settings, 2):
        assert worst["init"] == 0.0
        assert worst["loss"] < 2e-3
        assert worst["eval"] < 2e-3
        assert worst["norm"] < 2e-2


@pytest.mark.parametrize("common", ["all", "first"])
def test_layers_without_gradient_are_summed_as_zeros(pool: WorkerPool, common: str) -> None:
    """The loss does not reach the classification branch."""
    model = {**EVERYTHING, "n_labels": 3}
    check(pool, subgraph(2, 2, common=common), model, dtype="float64")


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


# --------------------------------------------------------------------------- labels

B, N_LABELS = 12, 3
CONFIG = tiny(n_labels=N_LABELS, dropout=0.1, attention_dropout=0.1, max_seq_len=12)


def label_losses(model: Model, batch: Tensor, rows: slice) -> list[Tensor]:
    """Return sums of language model and label losses; other ranks have no values."""
    generator = torch.Generator().manual_seed(5)
    at = torch.randint(0, CONFIG.max_seq_len, (B,), generator=generator)
    labels = torch.randint(0, N_LABELS, (B,), generator=generator)
    model.dropout_rng.at(rows)
    part = batch[rows]
    logits = model.logits({"tokens": part[:, :-1], "at": at[rows]})["labels"]
    if logits.is_meta:
        return [model.loss_sum(part[:, :-1], part[:, 1:]), logits]
    assert logits.shape == (len(part), N_LABELS)
    label = F.cross_entropy(logits, labels[rows], reduction="sum")
    return [model.loss_sum(part[:, :-1], part[:, 1:]), label]


def compare_labels(layout: Layout) -> dict[str, float]:
    """Compare labels; `elsewhere` is 1 if this rank did not compute them."""
    torch.set_num_threads(1)
    plan = LayoutConfig(**layout)
    axes = axes_of(plan)
    whole = build_parallel(CONFIG, LayoutConfig(), Axes(), 1, CPU, "float64")
    cut = build_parallel(CONFIG, plan, axes, 1, CPU, "float64")
    n_parts, part = axes.dp.size * axes.batch.size, axes.dp.index * axes.batch.size
    part, size = part + axes.batch.index, B // n_parts
    mine = slice(part * size, (part + 1) * size)
    worst: dict[str, float] = {}
    optimizers = [
        torch.optim.AdamW([{"params": [p for _, p in owned(model)]}], lr=1e-3, eps=1e-4)
        for model in (whole, cut)
    ]
    for step in range(2):
        batch, sums = batch_of(step, CONFIG, B), []
        for model, rows, the_axes in ((whole, slice(0, B), Axes()), (cut, mine, axes)):
            model.train()
            model.zero_grad()
            model.dropout_rng.step = step
            lm, label = label_losses(model, batch, rows)
            (lm / (B * CONFIG.max_seq_len) + label / B).backward()
            reduce_gradients(model.parameters(), the_axes)
            assert lm.is_meta == label.is_meta
            worst["elsewhere"] = float(lm.is_meta)
            value = torch.zeros(2, dtype=torch.float64)
            if the_axes.same_batch.index == 0:
                value = torch.stack((lm, label)).detach()
            sums.append(comm.all_reduce(value, the_axes.world))
        worst[f"loss {step}"] = float((sums[1] / sums[0] - 1).abs().max())
        worst[f"grad {step}"] = distance(cut, gradients(cut), gradients(whole))
        for optimizer in optimizers:
            optimizer.step()
        share_copies(cut.parameters(), axes)
    worst["parameter"] = distance(cut, values(cut), values(whole))
    assert_copies_equal(cut, axes)
    return worst


@pytest.mark.parametrize(
    "layout",
    [
        subgraph(2, **KINDS[0]),
        subgraph(2, **KINDS[6]),
        subgraph(3, **KINDS[4]),
        subgraph(2, 2, **KINDS[3]),
        subgraph(2, 2, **KINDS[5]),
    ],
    ids=short,
)
def test_labels_equal_one_device(pool: WorkerPool, layout: Layout) -> None:
    """Labels are on every process, or only on the first sub-grid if that has the common layers."""
    results = pool.run(n_of(layout), compare_labels, layout)
    elsewhere = sum(worst.pop("elsewhere") for worst in results)
    assert elsewhere == (len(results) - layout["dp"] if layout["common"] == "first" else 0)
    for worst in results:
        assert all(value < 1e-9 for value in worst.values()), worst
