"""Replicas that share out optimizer state (zero1), or parameters too (fsdp), train as one device."""

from __future__ import annotations

from typing import Any

import pytest

from gridformer.config import LayoutConfig
from tests.choosing import full_unless
from tests.multirank.exactness import TOLERANCE, compare
from tests.multirank.pool import WorkerPool

Layout = dict[str, Any]

SINGLE: Layout = {"scheme": "single", "dp": 2}
THREE: Layout = {"scheme": "single", "dp": 3}
MEGATRON: Layout = {"scheme": "megatron", "cols": 2, "dp": 2}
SEQUENCE: Layout = {**MEGATRON, "sequence_parallel": True}
OPTIMUS: Layout = {"scheme": "optimus", "rows": 2, "cols": 2, "dp": 2}
SUPER: Layout = {"scheme": "subgraph", "branches": 2, "dp": 2}
FIRST: Layout = {**SUPER, "common": "first"}
SCHEMES = [
    SINGLE,
    THREE,
    MEGATRON,
    SEQUENCE,
    SUPER,
    {**SUPER, "dp": 1},  # common layers have replicas, branches have none
    {**SUPER, "attention": "outside", "feed_forward": "common"},
    FIRST,
    # Processes of the second sub-grid hold nothing.
    {**FIRST, "attention": "outside", "feed_forward": "common"},
    OPTIMUS,
    {**OPTIMUS, "schedule": "gather", "keep_gathered": "none"},
    {**OPTIMUS, "schedule": "gather", "keep_gathered": "all", "stationary": "input"},
    {**OPTIMUS, "schedule": "pipelined"},
    {**OPTIMUS, "schedule": "broadcast", "stationary": "output"},
]
CASES = [
    {**scheme, "dp_mode": mode, "micro_batches": micro_batches}
    for scheme in SCHEMES
    for mode in ("zero1", "fsdp")
    for micro_batches in (1, 3)
]
TRAIN = {
    "global_batch": 36,
    "clip_norm": 0.05,
    "lr": 1e-3,
    "weight_decay": 0.1,
    "adam_eps": 1e-4,
    "dtype": "float64",
}
# Sizes that 3 does not divide, and tables of fewer rows than replicas.
MODEL = {
    "dropout": 0.2,
    "attention_dropout": 0.1,
    "max_seq_len": 8,
    "hidden_size": 40,
    "n_heads": 4,
    "ffn_size": 56,
}


def title(layout: Layout) -> str:
    return "-".join(str(value) for key, value in layout.items() if key != "cols")


def quick(layout: Layout) -> bool:
    """Every mode and scheme once, on as few processes as serve."""
    schemes = {"fsdp": (THREE, SEQUENCE, SUPER, FIRST), "zero1": (THREE, SEQUENCE, SUPER)}
    micro_batches = {"fsdp": 3, "zero1": 1}
    mode = layout["dp_mode"]
    plain = {k: v for k, v in layout.items() if k not in ("dp_mode", "micro_batches")}
    if plain == SCHEMES[10]:
        return mode == "fsdp" and layout["micro_batches"] == 1
    return plain in schemes[mode] and layout["micro_batches"] == micro_batches[mode]


@pytest.mark.parametrize("layout", full_unless(quick, CASES), ids=title)
def test_equals_one_device(pool: WorkerPool, layout: Layout) -> None:
    """Loss, gradient norm, every gradient, weights after some steps, with dropout."""
    n = LayoutConfig(**layout).n_processes
    for rank, worst in enumerate(pool.run(n, compare, layout, MODEL, TRAIN, 3)):
        assert worst["init"] == 0.0, f"rank {rank}: initial weights depend on the layout"
        wrong = {k: v for k, v in worst.items() if not v <= TOLERANCE["float64"]}
        assert not wrong, f"rank {rank}: {wrong}"
