"""Mixtures of experts on several devices, where the exactness matrix has no such layout or model.

Experts lie over axes of the mesh (`layout.experts_over`), or the scheme shards each of them.
"""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from gridformer.comm import irregular, record_messages
from gridformer.config import LayoutConfig
from gridformer.exactness import METHODS
from gridformer.models.blocks.experts import Router
from tests.support.fuzz.case import Case
from tests.support.fuzz.ranks import check_case
from tests.support.marks import full_unless
from tests.support.multirank.exactness import EVERYTHING, axes_of, compare, worst_of
from tests.support.multirank.layouts import Layout, n_of
from tests.support.multirank.matrix import MODELS, SETTINGS
from tests.support.multirank.pool import WorkerPool

Settings = dict[str, Any]

SOFTMAX: Settings = {**MODELS["Experts"], **EVERYTHING}
SIGMOID: Settings = {**MODELS["DeepSeek experts"], **EVERYTHING, "n_layers": 2}
REPLICAS: Layout = {"dp": 2, "experts_over": ["dp"]}
COLUMNS: Layout = {"scheme": "megatron", "cols": 2, "experts_over": ["cols"]}
SEQUENCE: Layout = {**COLUMNS, "sequence_parallel": True}
SQUARE: Layout = {"scheme": "optimus", "rows": 2, "cols": 2}
EVERYWHERE: Layout = {**SQUARE, "experts_over": ["rows", "cols"]}
OVER_S: Layout = {"scheme": "megatron_2d", "rows": 2, "cols": 1, "rows_over": "sequence"}
BRANCHES: Layout = {"scheme": "subgraph", "branches": 2, "experts_over": ["branches"]}
FIRST: Layout = {**BRANCHES, "common": "first"}
# Two groups of two replicas, which have the same experts.
GROUPS: Layout = {"dp": 4, "experts_over": ["dp"], "experts_dp": 2}
ONE_OF_NINE: Settings = {
    **SOFTMAX,
    "n_experts": 9,
    "experts_per_token": 1,
    "normalized_gates": False,
}
EIGHT_OF_NINE: Settings = {**SOFTMAX, "n_experts": 9, "experts_per_token": 8}

# A layout, the model, and settings of training. The names with a star run in `make test`.
CASES: dict[str, tuple[Layout, Settings, Settings]] = {
    "* 5 over 2 replicas and 2 columns": (
        {**COLUMNS, "dp": 2, "experts_over": ["cols", "dp"]},
        SOFTMAX,
        {},
    ),
    "5 over 4 branches": ({**BRANCHES, "branches": 4}, SOFTMAX, {}),
    "* 3 over 4": (EVERYWHERE, {**SOFTMAX, "n_experts": 3}, {}),
    "* 1 of 9": ({**SEQUENCE, "cols": 4}, ONE_OF_NINE, {}),
    "1 of 9, sharded": (SQUARE, ONE_OF_NINE, {}),
    "* 8 of 9": (FIRST, EIGHT_OF_NINE, {}),
    "8 of 9, over rows": ({**SQUARE, "experts_over": ["rows"]}, EIGHT_OF_NINE, {}),
    "the only one": ({**REPLICAS, "dp_mode": "zero1"}, {**ONE_OF_NINE, "n_experts": 1}, {}),
    "* more replicas than experts": (
        {**GROUPS, "dp_mode": "fsdp", "experts_dp": 0},
        {**ONE_OF_NINE, "n_experts": 2},
        {},
    ),
    "* parts of experts": ({"dp": 4, "dp_mode": "zero1"}, {**ONE_OF_NINE, "n_experts": 2}, {}),
    "* tokens that do not divide": (COLUMNS, {**SOFTMAX, "max_seq_len": 13}, {"global_batch": 3}),
    "groups, replicate": (GROUPS, SOFTMAX, {}),
    "groups, zero1": ({**GROUPS, "dp_mode": "zero1"}, SOFTMAX, {}),
    "* groups, fsdp": ({**GROUPS, "dp_mode": "fsdp"}, SIGMOID, {}),
    "groups of branches": ({**BRANCHES, **GROUPS, "experts_over": ["branches", "dp"]}, SIGMOID, {}),
    "* micro-batches": ({**SEQUENCE, "micro_batches": 4}, SOFTMAX, {}),
    "micro-batches, sums in each": (
        {**REPLICAS, "dp_mode": "fsdp", "micro_batches": 2, "gradient_sync": "micro_batch"},
        SIGMOID,
        {},
    ),
    "stages": ({**REPLICAS, "pp": 2, "micro_batches": 4}, {**SOFTMAX, "n_layers": 3}, {}),
    "* recomputed stages": (
        {**COLUMNS, "pp": 2, "micro_batches": 2},
        {**SOFTMAX, "n_layers": 3},
        METHODS["full"],
    ),
    "* recomputed": (REPLICAS, SOFTMAX, METHODS["full"]),
    "* all methods": ({**REPLICAS, "dp_mode": "fsdp"}, SIGMOID, METHODS["all"]),
    # Devices with parts of the same experts gather the rows that have traveled to these.
    "* parts over columns": ({**SEQUENCE, "dp": 2, "experts_over": ["dp"]}, SOFTMAX, {}),
    "parts, recomputed": ({**COLUMNS, "dp": 2, "experts_over": ["dp"]}, SIGMOID, METHODS["full"]),
    "parts in sub-graphs": ({**BRANCHES, "dp": 2, "experts_over": ["dp"]}, SIGMOID, {}),
    "* updated in backward on rows": (
        {**SQUARE, "cols": 1},
        {**SOFTMAX, "n_layers": 2},
        METHODS["in_backward"],
    ),
    "* rows over s": ({**OVER_S, "experts_over": ["rows"]}, SIGMOID, {}),
    "rows over s, sharded": (OVER_S, SOFTMAX, {}),
}


def title(case: Any) -> str:
    return str(case).strip("* ").replace(", ", "_").replace(" ", "_")


@pytest.mark.parametrize("name", full_unless(lambda name: name[0] == "*", CASES), ids=title)
def test_equals_one_device(pool: WorkerPool, name: str) -> None:
    layout, model, train = CASES[name]
    worst_of(pool.run(n_of(layout), compare, layout, model, {**SETTINGS, **train}, 2))


def to_one(layout: Layout, model: Settings) -> dict[str, float]:
    """Compare with one device where all tokens choose the first expert; the work of one rank."""
    forward = Router.forward

    def chosen(self: Router, x: Tensor) -> tuple[Tensor, ...]:
        expert, gate, counts = forward(self, x)
        all_first = torch.zeros_like(counts)
        all_first[0] = expert.numel()
        return torch.zeros_like(expert), gate, all_first

    with patch.object(Router, "forward", chosen):
        return compare(layout, model, SETTINGS, 2)


@pytest.mark.parametrize("layout", [REPLICAS, EVERYWHERE, FIRST], ids=["dp", "grid", "first"])
def test_all_tokens_may_go_to_one_expert(pool: WorkerPool, layout: Layout) -> None:
    """Devices with the other experts get no tokens, and their gradients are zero."""
    model = {**SOFTMAX, "experts_per_token": 1, "balance_loss": 0.0, "normalized_gates": False}
    worst_of(pool.run(n_of(layout), to_one, layout, model))


def expert_ranks(layout: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks with different experts, and those with the same ones, as one rank."""
    axes = axes_of(LayoutConfig(**layout))
    return axes["experts"].ranks, axes["experts_replicate"].ranks


@pytest.mark.parametrize(
    ("layout", "apart", "same"),
    [
        (
            {**GROUPS, "dp": 6, "experts_dp": 3},
            [(0, 1, 2)] * 3 + [(3, 4, 5)] * 3,
            [(0, 3), (1, 4), (2, 5)] * 2,
        ),
        (
            {**GROUPS, "scheme": "megatron", "cols": 2},  # neighbors are two ranks apart
            [(0, 2), (1, 3), (0, 2), (1, 3), (4, 6), (5, 7), (4, 6), (5, 7)],
            [(0, 4), (1, 5), (2, 6), (3, 7)] * 2,
        ),
        (
            {**COLUMNS, "dp": 4, "experts_over": ["dp", "cols"], "experts_dp": 2},
            [(0, 1, 2, 3)] * 4 + [(4, 5, 6, 7)] * 4,
            [(0, 4), (1, 5), (2, 6), (3, 7)] * 2,
        ),
    ],
    ids=["replicas", "beside columns", "with columns"],
)
def test_neighbors_share_the_experts(
    pool: WorkerPool, layout: Layout, apart: list[tuple[int, ...]], same: list[tuple[int, ...]]
) -> None:
    """Each two or three neighboring replicas have all experts together."""
    assert pool.run(n_of(layout), expert_ranks, layout) == [*zip(apart, same)]


def moved_rows() -> float:
    """Send rows of three elements, all but a few of which stay; return how many are counted."""
    axis = axes_of(LayoutConfig(**REPLICAS))["experts"]
    sends = [5, 2] if axis.index == 0 else [1, 6]
    receives = [5, 1] if axis.index == 0 else [2, 6]
    x = torch.arange(sum(sends)).repeat(3, 1).t() + 10.0 * axis.index
    with record_messages() as recorder:
        got = irregular.all_to_all_rows(x, sends, receives, axis, "why")
    want = [0, 1, 2, 3, 4, 10] if axis.index == 0 else [5, 6, 11, 12, 13, 14, 15, 16]
    assert got[:, 0].tolist() == want
    return recorder.moved("why", "experts")


def test_rows_that_stay_are_not_moved(pool: WorkerPool) -> None:
    """A rank sends two rows and gets one, the other one the reverse: the larger number counts."""
    assert pool.run(2, moved_rows) == [2 * 3, 2 * 3]


# --------------------------------------------------- moves and types

DATA: Settings = {"train": {"global_batch": 8, "dtype": "float64", "adam_eps": 1e-4, "steps": 4}}
SMALL: Settings = {"hidden_size": 12, "n_heads": 2, "vocab_size": 13, "max_seq_len": 4}
MOVES = {
    "replicas to columns": (REPLICAS, COLUMNS),
    "groups to a grid": ({**GROUPS, "dp_mode": "fsdp"}, SQUARE),
    "branches to one": (FIRST, {}),
}


@pytest.mark.parametrize("name", MOVES, ids=title)
def test_a_checkpoint_moves(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    """Biases of routers, whose moments stay zero, and experts with moments lie elsewhere then."""
    before, after = MOVES[name]
    model = {**SIGMOID, **SMALL, "n_experts": 5, "balance_rate": 0.1, "n_kv_heads": 0}
    run = {"model": model, "layout": before, **DATA}
    batch = {"padded": 0.0, "ignored": 0.3}
    check_case(pool, Case(run, batch, steps=4, stop=2, moved={"layout": after}), tmp_path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_other_types_are_close(pool: WorkerPool, tmp_path: Path, dtype: str) -> None:
    model = {**SOFTMAX, **SMALL, "n_kv_heads": 1}
    run = {"model": model, "layout": REPLICAS, "train": {**DATA["train"], "dtype": dtype}}
    check_case(pool, Case(run, {"padded": 0.0, "ignored": 0.0}, 2, 0, {}), tmp_path)
