"""The bytes per step that `--explain` states agree with the recorder, with recomputation.

Models of two layers and of one are run; their difference is one layer, without the traffic of the
embedding, the head and the loss. The comparison covers the messages of products, and those that
give recomputation its inputs; norms and copies of vectors are small and are not counted.
"""

from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gridformer.comm import record_messages
from gridformer.config import DataConfig, LayoutConfig, RunConfig, TrainConfig
from gridformer.data.samples.order import Rows
from gridformer.mesh.node_placement import NodeBlock
from gridformer.parallel import build_parallel
from gridformer.parallel.auto.decisions import decide_run
from gridformer.parallel.axes import build_axes
from gridformer.train.step import Stepper
from gridformer.utils.batch import Batch
from tests.support.marks import full_unless
from tests.support.multirank.exactness import CPU, axes_of, batches_of, tiny
from tests.support.multirank.layouts import Layout
from tests.support.multirank.matrix import MODELS
from tests.support.multirank.memory import a_run
from tests.support.multirank.pool import WorkerPool

B = 12
COUNTED = ("product", "kept", "slice", "concat", "attention")
GRID: Layout = {"scheme": "optimus", "rows": 2, "cols": 2}
SUPER: Layout = {"scheme": "subgraph", "branches": 4}
LAYOUTS: dict[str, Layout] = {
    "megatron": {"scheme": "megatron", "cols": 4},
    "sequence": {"scheme": "megatron", "cols": 4, "sequence_parallel": True},
    "sequence, kept": {"scheme": "megatron", "cols": 4, "sequence_parallel": True,
        "keep_gathered": "inputs"},
    "optimus": {**GRID, "keep_gathered": "none"},
    "optimus, kept": {**GRID, "keep_gathered": "all"},
    "optimus, broadcast": {**GRID, "schedule": "broadcast", "keep_gathered": "none"},
    "optimus, micro-batches": {**GRID, "keep_gathered": "weights", "micro_batches": 3},
    "rows over the sequence": {**GRID, "rows_over": "sequence", "keep_gathered": "none"},
    "2-D, rows over the sequence": {**GRID, "scheme": "megatron_2d", "rows_over": "sequence"},
    "stationary weights": {"scheme": "optimus", "rows": 4, "cols": 1, "stationary": "weight"},
    "D&SP": SUPER,
    "D&SP, outside": {**SUPER, "attention": "outside", "keep_gathered": "none"},
    "cSub": {**SUPER, "common": "first"},
    "cSub, outside": {**SUPER, "common": "first", "attention": "outside"},
}  # fmt: skip


def run_of(layout: Layout, family: str, recompute: str, n_layers: int, **changes: Any) -> RunConfig:
    sizes = {"max_seq_len": 12, "n_layers": n_layers, **changes}
    model = tiny(**{**MODELS[family], **sizes})
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
    some = {"sequence", "optimus, broadcast", "rows over the sequence", "stationary weights"}
    some |= {"2-D, rows over the sequence", "D&SP, outside", "cSub, outside"}
    return (family == "GPT-2" and mode == "full" and case[0] in some) or case in (
        ("megatron", "BERT", "full"),
        ("optimus", "BERT", "full"),
        ("optimus", "GPT-2", "none"),
        ("cSub", "GPT-2", "selective"),
    )


@pytest.mark.parametrize(("name", "family", "mode"), full_unless(quick, CASES, unpack=True))
def test_bytes_of_a_layer(pool: WorkerPool, name: str, family: str, mode: str) -> None:
    check_bytes(pool, *(run_of(LAYOUTS[name], family, mode, n) for n in (1, 2)))


@pytest.mark.parametrize("family", full_unless("BERT".__eq__, ["BERT", "Transformer"]))
def test_bytes_of_heads_over_rows(pool: WorkerPool, family: str) -> None:
    """Without chunks, in which dropout gathers no keys and values, four rows redistribute heads."""
    layout: Layout = {"scheme": "optimus", "rows": 4, "rows_over": "sequence"}
    model = {"max_seq_len": 16, "attention_dropout": 0.1}
    one, two = (run_of(layout, family, "selective", n, **model) for n in (1, 2))
    assert decide_run(two).choices.heads_over_rows
    check_bytes(pool, one, two)


def check_bytes(pool: WorkerPool, one: RunConfig, two: RunConfig) -> None:
    """Check what is said of a layer, by which the models of two runs differ."""
    ranks = zip(pool.run(4, moved, one), pool.run(4, moved, two))
    layer = [[b - a for a, b in zip(*rank)] for rank in ranks]
    said = [decide_run(run).traffic for run in (one, two)]
    for index, axis in enumerate(("col", "row")):
        most = max(rank[index] for rank in layer)
        assert said[1][axis] - said[0][axis] == pytest.approx(most, rel=1e-9), axis


RACKS = {"scheme": "optimus", "rows": 4, "cols": 2, "devices_per_node": 2, "nodes_per_rack": 2}
UNITS = {"node": 2, "rack": 4}  # devices
N, ROWS = 8, 16


def racked(n_layers: int, changes: dict[str, Any]) -> RunConfig:
    return a_run(
        {**RACKS, **changes}, {"n_layers": n_layers, "max_seq_len": 12}, {"global_batch": ROWS}
    )


def received(run: RunConfig, block: NodeBlock) -> list[tuple[int, bool, float]]:
    """Return for each message of products the rank before this one, if it is a row, and bytes."""
    torch.set_num_threads(1)
    axes = build_axes(run.layout, "cpu", block)
    model = build_parallel(run.model, run.layout, axes, 1, CPU, choices=decide_run(run).choices)
    batch = batches_of(0, tiny(n_layers=1, max_seq_len=12), ROWS)

    def read(rows: Rows) -> Batch:
        return {key: value[rows] for key, value in batch.items()}

    with record_messages() as recorder:
        Stepper(model, run.train, axes, run.layout)(0, partial(read))
    before = {}
    for axis in (axes.row, axes.col):
        ring = sorted(axis.ranks)
        before[axis.name] = ring[ring.index(dist.get_rank()) - 1]
    found = [r for r in recorder.records if r.label in ("product", "kept")]
    return [(before[r.axis], r.axis == "row", r.bytes) for r in found]


def entered(pool: WorkerPool, run: RunConfig, block: NodeBlock, unit: int) -> dict[Any, float]:
    """Return the bytes that enter each unit, by unit and by whether they travel along rows."""
    sums: dict[Any, float] = defaultdict(float)
    for rank, messages in enumerate(pool.run(N, received, run, block)):
        for before, is_row, n_bytes in messages:
            if before // unit != rank // unit:
                sums[rank // unit, is_row] += n_bytes
    return sums


@pytest.mark.parametrize("changes", [{}, {"rows": 2, "cols": 4}], ids=["4x2", "2x4"])
def test_bytes_into_nodes_and_racks(pool: WorkerPool, changes: dict[str, Any]) -> None:
    one, two = (racked(n, changes) for n in (1, 2))
    decided, less = decide_run(two), decide_run(one)
    assert decided.block is not None
    assert decided.block.rack is not None
    assert less.block == decided.block
    said = {
        "node": (less.candidates[0].bytes_in, decided.candidates[0].bytes_in),
        "rack": (less.racks[0].bytes_in, decided.racks[0].bytes_in),
    }
    for name, unit in UNITS.items():
        few, many = said[name]
        small, large = (entered(pool, run, decided.block, unit) for run in (one, two))
        for number in range(N // unit):
            for axis in ("row", "col"):
                key = number, axis == "row"
                found = large[key] - small[key]
                assert found == pytest.approx(many[axis] - few[axis], rel=1e-9), (name, key)
        assert sum(large.values()) > sum(small.values())
