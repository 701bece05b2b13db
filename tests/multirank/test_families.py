"""BERT, T5 and the Transformer train exactly as on one device, under every scheme.

Every batch has padding, targets that do not count, two losses and a source; dropout is on.
"""

from __future__ import annotations

from typing import Any

import pytest

from gridformer.config import LayoutConfig
from tests.support.marks import full_unless
from tests.support.multirank.exactness import TOLERANCE, TRAIN, compare
from tests.support.multirank.pool import WorkerPool

Layout = dict[str, Any]

DROPPING = {"dropout": 0.1, "attention_dropout": 0.1, "max_seq_len": 12, "n_layers": 2}
MODELS: dict[str, dict[str, Any]] = {
    "bert": {"family": "bert"},
    "bert-pre": {"family": "bert", "norm_position": "pre", "n_labels": 3},
    "t5": {"family": "t5", "relative_buckets": 8, "relative_max_distance": 16},
    "t5-wide": {"family": "t5", "head_dim": 8, "n_decoder_layers": 1},
    "transformer": {"family": "transformer", "label_smoothing": 0.1},
    "transformer-pre": {"family": "transformer", "norm_position": "pre", "n_decoder_layers": 1},
    "gpt2": {"family": "gpt2", "n_labels": 3},
    "llama-smoothed": {"family": "llama", "label_smoothing": 0.1},
}
MEGATRON: Layout = {"scheme": "megatron", "cols": 2}
OPTIMUS: Layout = {"scheme": "optimus", "rows": 2, "cols": 2}
SUB: Layout = {"scheme": "subgraph", "branches": 2}
LAYOUTS: dict[str, Layout] = {
    "data-dp2": {"scheme": "single", "dp": 2},
    "megatron-1x2": MEGATRON,
    "megatron-1x3-sp": {**MEGATRON, "cols": 3, "sequence_parallel": True},
    "optimus-2x2": OPTIMUS,
    "optimus-2x2-panels": {**OPTIMUS, "schedule": "pipelined", "stationary": "input"},
    "optimus-2x3-kept": {**OPTIMUS, "cols": 3, "schedule": "gather", "keep_gathered": "all"},
    "subgraph-2x2": {**SUB, "dp": 2},
    "subgraph-2-outside": {**SUB, "attention": "outside", "feed_forward": "common"},
    "subgraph-2-first": {**SUB, "common": "first"},
    "subgraph-3-first-outside": {
        **{**SUB, "branches": 3, "common": "first"},
        **{"attention": "outside", "feed_forward": "common", "micro_batches": 2},
    },
}


def quick(case: tuple[str, str]) -> bool:
    """Quick cases are variants of models and layouts that the exactness matrix does not have."""
    model, layout = case
    return (
        (model in ("bert-pre", "transformer-pre") and layout == "optimus-2x2")
        or (model == "t5-wide" and layout == "subgraph-3-first-outside")
        or (model == "bert" and layout in ("optimus-2x2-panels", "megatron-1x3-sp"))
        or (model == "transformer" and layout == "subgraph-2-outside")
        or (model == "llama-smoothed" and layout == "megatron-1x3-sp")
    )


def n_of(layout: Layout) -> int:
    return LayoutConfig(**layout).n_processes


CASES = sorted(
    ((model, layout) for layout in LAYOUTS for model in MODELS),
    key=lambda case: n_of(LAYOUTS[case[1]]),
)


@pytest.mark.parametrize("case", full_unless(quick, CASES), ids="-".join)
def test_equals_one_device(pool: WorkerPool, case: tuple[str, str]) -> None:
    model, layout = MODELS[case[0]], LAYOUTS[case[1]]
    settings = {**TRAIN, "dtype": "float64"}
    results = pool.run(n_of(layout), compare, layout, {**DROPPING, **model}, settings, 2)
    for rank, worst in enumerate(results):
        assert worst["init"] == 0.0, f"rank {rank}: initial weights depend on the layout"
        wrong = {k: v for k, v in worst.items() if not v <= TOLERANCE["float64"]}
        assert not wrong, f"rank {rank}: {wrong}"
