"""A chunked loss with sharded logits: the bytes it holds, and the traffic of all chunks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from gridformer.comm import record_messages
from gridformer.config import LayoutConfig
from gridformer.parallel import build_parallel
from gridformer.parallel.tensor.summa import gathered_weights_scope
from tests.support.marks import full_unless
from tests.support.memory_log import MemoryLog
from tests.support.multirank.exactness import CPU, axes_of, batches_of, tiny
from tests.support.multirank.pool import WorkerPool

Layout = dict[str, Any]

B, S, V = 16, 24, 960
CONFIG = tiny(n_layers=1, vocab_size=V, hidden_size=12, n_heads=4)
H = CONFIG.hidden_size
OPTIMUS: Layout = {"scheme": "optimus", "rows": 2, "cols": 2, "keep_gathered": "none"}
LAYOUTS: dict[str, Layout] = {
    "megatron": {"scheme": "megatron", "cols": 4},
    "sequence": {"scheme": "megatron", "cols": 4, "sequence_parallel": True},
    "gather": {**OPTIMUS, "schedule": "gather"},
    "gather, input stays": {**OPTIMUS, "schedule": "gather", "stationary": "input"},
    "gather, weights kept": {**OPTIMUS, "schedule": "gather", "keep_gathered": "weights"},
    "broadcast": {**OPTIMUS, "schedule": "broadcast"},
    "pipelined": {**OPTIMUS, "schedule": "pipelined"},
}


def loss(layout: Layout, tokens: int) -> tuple[int, int, Counter[tuple[str, str]]]:
    """Measure one rank's loss and backward pass.

    Returns the largest tensor it makes and its peak increase, both in bytes, and the elements moved
    by axis and collective.
    """
    torch.set_num_threads(1)
    plan = LayoutConfig(**layout)
    axes = axes_of(plan)
    model = build_parallel(CONFIG, plan, axes, 1, CPU).train()
    model.loss_chunk_tokens = tokens
    rows = slice(axes.row.index * B // axes.row.size, (axes.row.index + 1) * B // axes.row.size)
    batch = {key: value[rows] for key, value in batches_of(0, CONFIG, B).items()}
    with gathered_weights_scope(model), MemoryLog() as tracker, record_messages() as recorder:
        tracker.mark([*model.parameters(), *batch.values()], "before")
        hidden = model.hidden(batch).detach().requires_grad_()
        start, before, sent = tracker.now, tracker.live(), len(recorder.records)
        model.losses_of(hidden, batch)["tokens"].backward()
    moved: Counter[tuple[str, str]] = Counter()
    for r in recorder.records[sent:]:
        moved[r.axis, r.op] += int(r.moved)
    largest = max(e.n_bytes for e in tracker.entries if e.born > start)
    peak = int(tracker.curve()[start + 1 :].max())
    return largest, peak - before, moved


@pytest.mark.parametrize(
    "name", full_unless(lambda name: name not in ("pipelined", "gather, weights kept"), LAYOUTS)
)
def test_a_rank_holds_few_chunks_of_its_logits(pool: WorkerPool, name: str) -> None:
    """The largest tensor is a chunk's logits; besides the table less than three of them live.

    A rank has v/c columns of the logits of b s / r tokens (or partial sums of all v). The table may
    exist gathered, as a chunk's gradient, as their sum, and in flight.
    """
    tokens, layout = 64, LAYOUTS[name]
    rows, cols = layout.get("rows", 1), layout["cols"]
    columns = V if "input" in name else V // cols
    table, x = V * H // cols * 4, B * S * H // rows * 4
    for largest, peak, _ in pool.run(4, loss, layout, 0):
        assert largest == B * S // rows * columns * 4
        # the logits and their gradient; earlier tensors may have been freed
        assert peak >= 1.5 * largest
    for largest, peak, _ in pool.run(4, loss, layout, tokens):
        part = tokens * columns * 4
        assert largest == part
        assert part < B * S // rows * columns * 4 / 2
        assert peak <= 3 * part + 4 * table + 4 * x


@pytest.mark.parametrize("name", ["sequence", "gather", "gather, input stays"])
def test_the_table_travels_once_for_all_chunks(pool: WorkerPool, name: str) -> None:
    """The table is gathered once and its gradient is summed once.

    Without chunks, it is gathered again for the gradient of the head's input.
    """
    layout = LAYOUTS[name]
    block = V * H // 4 if layout["scheme"] == "optimus" else 0
    whole, some, many = (pool.run(4, loss, layout, tokens) for tokens in (0, 64, 16))
    for (_, _, before), (_, _, one), (_, _, other) in zip(whole, some, many):
        assert one == other, "the number of parts does not matter"
        assert before["row", "all_gather"] == 2 * block
        assert one["row", "all_gather"] == block
        assert one["row", "reduce_scatter"] == before["row", "reduce_scatter"] == block
        assert one["col", "all_gather"] <= before["col", "all_gather"]
