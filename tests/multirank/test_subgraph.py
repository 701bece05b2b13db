"""Counts traffic under sub-graph parallelism: exact kinds and volumes of docs/concepts/subgraph.md.

Models of two layers and of one are run; their difference is one layer. T is the number of tokens in
a replica's micro-batch, for all of its branches together.
"""

import math
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
import torch

from gridformer.comm import Recorder, record_messages
from gridformer.config import LayoutConfig, RunConfig, TrainConfig
from gridformer.data.samples.order import Rows
from gridformer.models import build_model
from gridformer.parallel.auto.decisions import decide_run
from gridformer.train.step import Stepper
from gridformer.utils.batch import Batch, next_words
from tests.support.marks import full_unless
from tests.support.multirank.exactness import axes_of, batch_of, built, tiny
from tests.support.multirank.layouts import KINDS, Layout, in_branches, n_of, short, subgraph
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.volumes import B, passes

CONFIG = tiny(max_seq_len=8)
S, H = CONFIG.max_seq_len, CONFIG.hidden_size
T = B * S
OPS = {
    "all": {
        "split": "all_gather",
        "sum": "reduce_scatter",
        "slice": "all_to_all",
        "concat": "all_to_all",
    },
    "first": {"split": "broadcast", "sum": "reduce", "slice": "scatter", "concat": "gather"},
}
TRANSPOSE = {"split": "sum", "sum": "split", "slice": "concat", "concat": "slice"}
Kinds = Counter[tuple[str, str, int]]  # label, operation, elements


def kinds(recorder: Recorder) -> Kinds:
    assert {(r.axis) for r in recorder.records} <= {"branch"}
    return Counter((r.label, r.op, round(r.moved)) for r in recorder.records)


def one_layer(layout: Layout) -> tuple[Kinds, Kinds, Kinds, Kinds]:
    """Return forward and backward traffic of one layer, and of everything else."""
    plan = LayoutConfig(**layout)
    two, one = (
        [kinds(recorder) for recorder in passes(plan, tiny(max_seq_len=S, n_layers=n))]
        for n in (2, 1)
    )
    layer = [a - b for a, b in zip(two, one)]
    rest = [a - b for a, b in zip(one, layer)]
    return layer[0], layer[1], rest[0], rest[1]


def elements(boundary: str, width: int, g: int, common: str, root: bool) -> Fraction:
    """Return what one boundary moves over a rank's link."""
    whole = Fraction(T * width)
    if boundary in ("split", "sum"):
        if common == "all":
            return whole * (g - 1) / g
        return Fraction(0) if root else whole  # pipelined: only what arrives, or leaves, here
    if common == "all":
        return whole / g * (g - 1) / g  # this process's samples except its own slice
    return whole * (g - 1 if root else 1) / g


def wanted(layout: Layout, keep: str, root: bool) -> tuple[Kinds, Kinds]:
    """Return one layer's expected traffic, from the table of boundaries."""
    g, common = layout["branches"], layout["common"]
    attention = [("split", H), ("sum", H)]
    if layout["attention"] == "outside":
        attention = [("slice", 3 * H), ("concat", H)]
    boundaries = attention + [("split", H), ("sum", H)] * (layout["feed_forward"] == "branched")
    again = [b for b in boundaries if b[0] == "split"] if keep == "none" else []

    def count(passed: list[tuple[str, int]], labels: list[str]) -> Kinds:
        moved = [elements(b, width, g, common, root) for b, width in passed]
        assert all(m.denominator == 1 for m in moved)
        ops = [OPS[common][b] for b, _ in passed]
        return Counter(zip(labels, ops, map(int, moved)))

    def label(boundary: str) -> str:
        return "product" if boundary in ("split", "sum") else boundary

    forward = count(boundaries, [label(b) for b, _ in boundaries])
    back = [(TRANSPOSE[b], width) for b, width in boundaries]
    # A message keeps the name of the boundary whose gradient it is.
    labels = [label(b) for b, _ in boundaries + again]
    return forward, count(back + again, labels)


LAYERS = sorted(
    [
        subgraph(g, dp, **kind, keep_gathered=keep)
        for g, dp in ((3, 1), (2, 2), (4, 1))
        for kind in KINDS
        for keep in ("none", "inputs")
        if g < 4 or keep == "none"
    ],
    key=n_of,
)
SIZES = sorted({n_of(layout) for layout in LAYERS})


def layers(layouts: list[Layout]) -> list[tuple[int, tuple[Kinds, Kinds, Kinds, Kinds]]]:
    return [(axes_of(LayoutConfig(**layout)).branch.index, one_layer(layout)) for layout in layouts]


@pytest.mark.parametrize("n", SIZES)
def test_layer_traffic_equals_the_formulas(pool: WorkerPool, n: int) -> None:
    """Compare kinds of collectives and elements in both passes; ends send nothing."""
    layouts = [layout for layout in LAYERS if n_of(layout) == n]
    for found in pool.run(n, layers, layouts):
        for layout, (branch, (forward, backward, *rest)) in zip(layouts, found):
            want = wanted(layout, layout["keep_gathered"], branch == 0)
            assert (forward, backward) == want, short(layout)
            assert not any(rest), short(layout)


# --------------------------------------------------- predicted volumes


def one_step(layout: Layout, micro_batches: int) -> tuple[int, Recorder, Recorder]:
    """Return this rank's branch, and one step's traffic without gradients and of gradients."""
    model, axes, plan = built(layout, CONFIG)
    settings = TrainConfig(global_batch=2 * B)
    plan = plan.model_copy(update={"micro_batches": micro_batches})
    batch = batch_of(0, CONFIG, 2 * B)

    def read(rows: Rows) -> Batch:
        return next_words(batch[rows])

    stepper = Stepper(model, settings, axes, plan)
    with record_messages() as recorder:
        stepper(0, read)
    gradients = [r for r in recorder.records if r.label == "gradients"]
    rest = [r for r in recorder.records if r.label != "gradients"]
    return axes.branch.index, Recorder(rest), Recorder(gradients)


@pytest.mark.parametrize(
    ("layout", "micro_batches"),
    [
        (subgraph(2, 2, **KINDS[0], keep_gathered="none"), 3),
        (subgraph(2, 2, **KINDS[1], keep_gathered="inputs"), 2),
        (subgraph(2, 2, **KINDS[2], keep_gathered="none"), 2),
        (subgraph(4, **KINDS[3]), 3),
        (subgraph(4, **KINDS[4], keep_gathered="none"), 2),
        (subgraph(4, **KINDS[6], keep_gathered="inputs"), 1),
        (subgraph(4, **KINDS[7]), 2),
    ],
    ids=short,
)
def test_step_traffic_equals_the_explanation(
    pool: WorkerPool, layout: Layout, micro_batches: int
) -> None:
    """Check several micro-batches on the process that moves most (in cSub, in any branch).

    In addition, only metrics travel, before and after.
    """
    plan = LayoutConfig(**layout, micro_batches=micro_batches)
    train = {"global_batch": 2 * B}
    run = RunConfig.model_validate(
        {"model": CONFIG, "data": {"path": "x"}, "layout": plan, "train": train}
    )
    decided = decide_run(run)
    messages = sum(decided.choices.step(c).messages for c in decided.choices.products.values())
    largest, labels = 0.0, set()
    for _, rest, _ in pool.run(4, one_step, layout, micro_batches):
        assert rest.count("metrics") == Counter(all_reduce=2)
        assert rest.count("product").total() == messages
        labels |= {r.label for r in rest.records} - {"metrics"}
        largest = max(largest, rest.bytes() - rest.bytes("metrics"))
    outside = {"slice", "concat"} if layout["attention"] == "outside" else set()
    assert labels == outside | ({"product"} if messages else set())
    assert largest == pytest.approx(decided.traffic["col"], rel=1e-9)
    assert decided.traffic["row"] == 0


# --------------------------------------------------- gradients


def sizes(layout: Layout) -> tuple[int, int]:
    """Return the elements of one process's share of the branches, and of the common layers."""
    with torch.device("meta"):
        shares = {name: p.numel() for name, p in build_model(CONFIG).named_parameters()}
    inside = sum(n for name, n in shares.items() if in_branches(name, layout))
    return inside // layout["branches"], sum(shares.values()) - inside


@pytest.mark.parametrize("micro_batches", full_unless(lambda m: m == 2, [1, 2]))
@pytest.mark.parametrize(
    "layout",
    [
        subgraph(2, **KINDS[2]),
        *(subgraph(2, 2, **kind) for kind in KINDS),
        subgraph(4, **KINDS[0]),
        subgraph(4, **KINDS[4]),
    ],
    ids=short,
)
def test_gradients_of_branches_travel_among_those_that_hold_them(
    pool: WorkerPool, layout: Layout, micro_batches: int
) -> None:
    """Branches' gradients travel among n/g processes, common ones among n or the first sub-grid.

    They travel once per step, whatever the number of micro-batches.
    """
    dp, n = layout["dp"], n_of(layout)
    branch_share, common = sizes(layout)
    for branch, _, gradients in pool.run(n, one_step, layout, micro_batches):
        over_dp, every = branch_share, common
        if layout["common"] == "first":
            over_dp, every = branch_share + (common if branch == 0 else 0), 0
        want = {
            "dp": 2 * Fraction(dp - 1, dp) * over_dp,
            "dp_branch": 2 * Fraction(n - 1, n) * every,
        }
        assert {r.axis for r in gradients.records} == {
            name for name, moved in want.items() if moved
        }
        assert {r.op for r in gradients.records} <= {"all_reduce"}
        for name, moved in want.items():
            assert math.isclose(gradients.moved(axis=name), moved), name
        assert {r.size for r in gradients.records if r.axis == "dp"} <= {dp}
        assert {r.size for r in gradients.records if r.axis == "dp_branch"} <= {n}


# --------------------------------------------------- placement


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
    cut, axes, _ = built(layout, tiny(**model))
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
