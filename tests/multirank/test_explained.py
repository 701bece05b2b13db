"""The bytes per step that `--explain` states agree with the recorder, with recomputation.

Models of two layers and of one are run; their difference is one layer, without the traffic of the
embedding, the head and the loss. The comparison covers the messages of products, and those that
give recomputation its inputs; norms and copies of vectors are small and are not counted.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gridformer.comm import record_messages
from gridformer.config import DataConfig, LayoutConfig, RunConfig, TrainConfig
from gridformer.data.samples.order import Rows
from gridformer.parallel import build_parallel
from gridformer.parallel.auto.decisions import decide_run
from gridformer.train.step import Stepper
from gridformer.utils.batch import Batch
from tests.support.marks import full_unless
from tests.support.multirank.exactness import CPU, axes_of, batches_of, tiny
from tests.support.multirank.matrix import MODELS
from tests.support.multirank.pool import WorkerPool

Layout = dict[str, Any]

B = 12
COUNTED = ("product", "kept", "slice", "concat")
GRID: Layout = {"scheme": "optimus", "rows": 2, "cols": 2}
SUPER: Layout = {"scheme": "subgraph", "branches": 4}
LAYOUTS: dict[str, Layout] = {
    "megatron": {"scheme": "megatron", "cols": 4},
    "sequence": {"scheme": "megatron", "cols": 4, "sequence_parallel": True},
    "sequence, kept": {
        "scheme": "megatron",
        "cols": 4,
        "sequence_parallel": True,
        "keep_gathered": "inputs",
    },
    "optimus": {**GRID, "keep_gathered": "none"},
    "optimus, kept": {**GRID, "keep_gathered": "all"},
    "optimus, broadcast": {**GRID, "schedule": "broadcast", "keep_gathered": "none"},
    "optimus, micro-batches": {**GRID, "keep_gathered": "weights", "micro_batches": 3},
    "D&SP": SUPER,
    "D&SP, outside": {**SUPER, "attention": "outside", "keep_gathered": "none"},
    "cSub": {**SUPER, "common": "first"},
    "cSub, outside": {**SUPER, "common": "first", "attention": "outside"},
}


def run_of(layout: Layout, family: str, recompute: str, n_layers: int) -> RunConfig:
    model = tiny(**{**MODELS[family], "max_seq_len": 12, "n_layers": n_layers})
    if model.two_stacks:
        model = model.model_copy(update={"n_decoder_layers": n_layers})
    s = model.max_seq_len
    lengths: dict[str, Any] = (
        {"seq_len": s, "source_len": 2 * s} if model.two_stacks else {"seq_len": s}
    )
    return RunConfig(
        model=model,
        data=DataConfig(path=Path("none"), **lengths),
        layout=LayoutConfig(**layout),
        train=TrainConfig(global_batch=B, recompute=recompute),  # type: ignore[arg-type]
    )


def moved(run: RunConfig) -> tuple[float, float]:
    """Return the bytes this rank receives for products in a step: activations, and weights."""
    torch.set_num_threads(1)
    axes, layout = axes_of(run.layout), run.layout
    choices = decide_run(run).choices
    model = build_parallel(run.model, layout, axes, 1, CPU, choices=choices)
    batch = batches_of(0, run.model, B)

    def read(rows: Rows) -> Batch:
        return {key: value[rows] for key, value in batch.items()}

    with record_messages() as recorder:
        Stepper(model, run.train, axes, layout)(0, partial(read))
    found = [r for r in recorder.records if r.label in COUNTED]
    assert {r.axis for r in found} <= {"col", "row", "branch"}
    row = sum(r.moved for r in found if r.axis == "row")
    return 4 * (sum(r.moved for r in found) - row), 4 * row


CASES = [
    (name, family, mode)
    for name in LAYOUTS
    for family in ("GPT-2", "BERT", "T5")
    for mode in ("none", "selective", "full")
]


def quick(case: tuple[str, str, str]) -> bool:
    _, family, mode = case
    return (family == "GPT-2" and mode == "full") or case in (
        ("megatron", "BERT", "full"),
        ("optimus", "BERT", "full"),
        ("optimus", "GPT-2", "none"),
        ("cSub", "GPT-2", "selective"),
    )


@pytest.mark.parametrize(("name", "family", "mode"), full_unless(quick, CASES, unpack=True))
def test_bytes_of_a_layer(pool: WorkerPool, name: str, family: str, mode: str) -> None:
    one, two = (run_of(LAYOUTS[name], family, mode, n) for n in (1, 2))
    ranks = zip(pool.run(4, moved, one), pool.run(4, moved, two))
    layer = [[b - a for a, b in zip(*rank)] for rank in ranks]
    said = [decide_run(run).traffic for run in (one, two)]
    for index, axis in enumerate(("col", "row")):
        most = max(rank[index] for rank in layer)
        assert said[1][axis] - said[0][axis] == pytest.approx(most, rel=1e-9), axis
