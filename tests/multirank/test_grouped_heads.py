"""Heads of keys and values that do not divide over columns or branches, and joined products.

The exactness matrix has 3 such heads over 2 columns. Here they are replicated in all other ways:
blocks of several columns, blocks with several heads, and columns whose queries read their heads
unevenly.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gridformer.config import LayoutConfig, TrainConfig
from gridformer.parallel import build_parallel
from gridformer.parallel.auto.heuristics import decide
from gridformer.parallel.auto.products import Work, blocks_of
from gridformer.parallel.data.gradients import owned
from gridformer.parallel.tensor.linear import kv_heads_of
from gridformer.train.step import Stepper
from tests.support.marks import full_unless
from tests.support.multirank.exactness import (
    CPU,
    TRAIN,
    assert_equal_one_device,
    axes_of,
    batches_of,
    tiny,
)
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.volumes import B, S, agrees, passes, predicted, volume_of

Layout = dict[str, Any]

LLAMA: dict[str, Any] = {
    "family": "llama",
    "n_layers": 1,
    "max_seq_len": 8,
    "ffn_size": 96,
    "qkv_bias": True,
    "qk_norm": True,
    "tied_head": False,
}
MEGATRON = {"scheme": "megatron", "cols": 4}
OPTIMUS = {"scheme": "optimus", "rows": 2, "cols": 2}
BRANCHES = {"scheme": "subgraph", "branches": 4}
PAIR = {"scheme": "subgraph", "branches": 2, "common": "first"}
# The layout, the heads of keys and values, and other changes of the training.
CASES: list[tuple[Layout, int, dict[str, Any]]] = [
    ({**MEGATRON, "sequence_parallel": True}, 6, {}),
    ({**OPTIMUS, "schedule": "broadcast", "stationary": "input"}, 1, {}),
    ({**BRANCHES, "attention": "outside"}, 6, {}),
    (MEGATRON, 1, {"update": "in_backward", "clip_by": "layer"}),
    (MEGATRON, 2, {"recompute": "full", "loss_chunk_tokens": 16}),
    (MEGATRON, 4, {}),
    ({"scheme": "megatron_2d", "rows": 2, "cols": 2}, 1, {"recompute": "selective"}),
    ({"scheme": "megatron_2d", "rows": 2, "cols": 2, "keep_gathered": "all"}, 4, {}),
    ({**OPTIMUS, "schedule": "pipelined"}, 3, {"recompute": "full"}),
    ({**OPTIMUS, "keep_gathered": "all"}, 1, {"update": "in_backward", "clip_by": "layer"}),
    ({"scheme": "optimus", "rows": 1, "cols": 4}, 6, {"loss_chunk_tokens": 16}),
    (BRANCHES, 2, {"recompute": "full"}),
    ({**BRANCHES, "feed_forward": "common"}, 6, {}),
    ({**BRANCHES, "attention": "outside", "feed_forward": "common"}, 2, {}),
    (PAIR, 1, {"recompute": "full"}),
    ({**PAIR, "attention": "outside"}, 3, {}),
    ({**PAIR, "order": "contiguous", "feed_forward": "common"}, 1, {}),
    ({**PAIR, "dp": 2, "dp_mode": "fsdp"}, 1, {}),
    ({"scheme": "subgraph", "branches": 2, "dp": 2, "dp_mode": "zero1"}, 1, {}),
    ({**OPTIMUS, "rows": 1, "dp": 2, "dp_mode": "fsdp"}, 1, {"update": "in_backward"}),
    ({**OPTIMUS, "rows": 1, "dp": 2, "dp_mode": "zero1"}, 3, {}),
    ({"scheme": "megatron", "cols": 2, "pp": 2, "micro_batches": 2}, 1, {}),
]
QUICK = [CASES[0], CASES[2], CASES[3]]


@pytest.mark.parametrize(
    ("layout", "heads", "train"),
    full_unless(QUICK.__contains__, CASES, unpack=True),
    ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else str(x),
)
def test_equals_one_device(
    pool: WorkerPool, layout: Layout, heads: int, train: dict[str, Any]
) -> None:
    if train.get("update") == "in_backward":
        train = {"clip_by": "layer", **train}
    settings = {**TRAIN, "global_batch": 16, "dtype": "float64", **train}
    assert_equal_one_device(pool, layout, {**LLAMA, "n_kv_heads": heads}, settings)


def test_every_query_reads_its_head_of_keys() -> None:
    """A column's heads of keys are found by their index in the model."""
    for heads, kv_heads, columns in ((12, 6, 4), (12, 3, 2), (8, 2, 4), (12, 4, 4), (24, 8, 12)):
        blocks = blocks_of(kv_heads, columns)
        held, mine = kv_heads // blocks, heads // columns
        for column in range(columns):
            read = kv_heads_of(heads, kv_heads, column, columns)
            if read is None:
                assert mine % held == 0
                read = tuple(i // (mine // held) for i in range(mine))
            first = column * blocks // columns * held
            wanted = [(column * mine + i) * kv_heads // heads for i in range(mine)]
            assert [first + i for i in read] == wanted


# --------------------------------------------------------------------------- owners


def what_a_rank_owns(layout: Layout, model: dict[str, Any]) -> tuple[dict[str, int], int]:
    """Return the elements that this rank owns, by name, and those of all that it holds."""
    config, plan = tiny(**model), LayoutConfig(**layout)
    axes = axes_of(plan)
    cut = build_parallel(config, plan, axes, 1, CPU)
    stepper = Stepper(cut, TrainConfig(global_batch=B), axes, plan)
    stepper(0, lambda rows: {k: x[rows] for k, x in batches_of(0, config, B).items()})
    return {name: p.numel() for name, p in owned(cut)}, sum(p.numel() for p in cut.parameters())


def test_each_element_has_one_owner(pool: WorkerPool) -> None:
    """Together the ranks own the model once, and hold no more copies of heads than needed."""
    torch.set_num_threads(1)
    model = {**LLAMA, "n_kv_heads": 2, "vocab_size": 96}
    found = pool.run(4, what_a_rank_owns, MEGATRON, model)
    h, d, f, v = 48, 4, 96, 96
    matrices = 2 * v * h + h * 12 * d + 2 * h * 2 * d + h * 12 * d + 3 * h * f
    vectors = 12 * d + 2 * 2 * d + 3 * h + 2 * d
    assert sum(n for mine, _ in found for n in mine.values()) == matrices + vectors
    keys = "layers.0.attention.qkv.k.weight"
    assert [keys in mine for mine, _ in found] == [True, False, True, False]
    heads = 2 * h * 2 * d + 2 * 2 * d  # k and v, which two columns each hold
    whole = 3 * h + 2 * d
    assert {held for _, held in found} == {(matrices + vectors + heads + 3 * whole) // 4}


# --------------------------------------------------------------------------- messages


def one_layer(layout: Layout, model: dict[str, Any]) -> Any:
    """Return the volumes of the products of one layer, forward and backward."""
    plan = LayoutConfig(**layout)
    two, one = (passes(plan, tiny(**{**model, "n_layers": n})) for n in (2, 1))
    pairs = zip(two, one)
    return [volume_of(a, "product").minus(volume_of(b, "product")) for a, b in pairs]


TRAFFIC: list[tuple[Layout, int]] = [
    ({**MEGATRON, "keep_gathered": "none"}, 2),
    ({**MEGATRON, "sequence_parallel": True, "keep_gathered": "none"}, 6),
    ({"scheme": "megatron_2d", "rows": 2, "cols": 2, "keep_gathered": "none"}, 1),
    ({**OPTIMUS, "schedule": "gather", "keep_gathered": "none"}, 3),
    ({**OPTIMUS, "schedule": "pipelined"}, 4),
]


@pytest.mark.parametrize(
    ("layout", "heads"),
    full_unless(lambda case: case == TRAFFIC[3], TRAFFIC, unpack=True),
    ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else str(x),
)
def test_a_joined_product_sends_what_one_product_sends(
    pool: WorkerPool, layout: Layout, heads: int
) -> None:
    """Its input enters the section once, and all its weights are one message."""
    plan = LayoutConfig(**layout)
    model = {**LLAMA, "n_kv_heads": heads, "max_seq_len": S, "qk_norm": False}
    said = predicted(decide(tiny(**model), plan, Work(tokens=B * S)))
    for found in pool.run(plan.n_processes, one_layer, layout, model):
        for counted, wanted in zip(found, said):
            agrees(counted, wanted)
