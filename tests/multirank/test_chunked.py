"""Activations and logits in chunks: the same numbers and volumes, with less memory.

The models in tests are far too small to be chunked, so here a chunk is a few hundred bytes.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch

from gridformer.comm import record_messages
from gridformer.config import LayoutConfig, ModelConfig, RunConfig
from gridformer.memory.estimate import estimate_rank
from gridformer.models import Model
from gridformer.parallel import build_parallel
from gridformer.parallel.auto import heuristics as rules
from gridformer.parallel.auto.cost import Choice, Choices
from gridformer.parallel.auto.heuristics import decide
from gridformer.parallel.auto.products import Work
from gridformer.parallel.tensor import summa
from gridformer.parallel.tensor.linear import GridLinear
from gridformer.parallel.tensor.summa import gathered_weights_scope
from tests.support.marks import full_unless
from tests.support.memory_log import MemoryLog
from tests.support.multirank import exactness
from tests.support.multirank.layouts import Layout
from tests.support.multirank.matrix import MODELS, SETTINGS
from tests.support.multirank.memory import a_run, agrees_of, measured
from tests.support.multirank.nccl_path import on_nccl
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.volumes import CONFIG, B, S, Volume, agrees, predicted, volume_of

STEPS = 2


@contextmanager
def parts_of(n_bytes: int) -> Iterator[list[Choices]]:
    """Make all decisions inside use chunks of `n_bytes`; yields the choices they return.

    Whether chunks save memory does not matter, as it does otherwise.
    """
    decided: list[Choices] = []

    def chunked(choices: Choices, layout: LayoutConfig) -> Choices:
        def cut(choice: Choice) -> Choice:
            most = min(rules.MOST_CHUNKS, rules.max_chunks(choices, layout, choice.product))
            n_chunks = math.ceil(choices.activation_bytes(choice) / n_bytes)
            return replace(choice, n_chunks=max(1, min(n_chunks, most)))

        return rules._each(choices, cut)

    real = rules._at_once

    def watched(found: Choices) -> Choices:
        decided.append(real(found))
        return decided[-1]

    with patch.object(rules, "_chunked", chunked), patch.object(rules, "_at_once", watched):
        yield decided


# --------------------------------------------------- numbers

GRID: dict[str, Any] = {"scheme": "optimus", "rows": 2, "cols": 2, "keep_gathered": "none"}
SEQUENCE: dict[str, Any] = {"scheme": "megatron", "cols": 2, "sequence_parallel": True}
BRANCHES: dict[str, Any] = {"scheme": "subgraph", "branches": 2, "keep_gathered": "none"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "grid": GRID,
    "grid, weights kept": {**GRID, "keep_gathered": "weights", "micro_batches": 2},
    "grid, inputs stay": {**GRID, "stationary": "input"},
    "grid, outputs stay": {**GRID, "stationary": "output"},
    "row": {**GRID, "rows": 1, "cols": 3},
    "stages": {**GRID, "rows": 1, "pp": 2, "micro_batches": 4},
    "fsdp": {**GRID, "rows": 1, "dp": 2, "dp_mode": "fsdp"},
    "sequence": {**SEQUENCE, "keep_gathered": "none"},
    # Micro-batches of one sequence.
    "tokens": {**SEQUENCE, "cols": 3, "keep_gathered": "none", "micro_batches": 4},
    # These chunks only hide messages.
    "hidden, grid": GRID,
    "hidden, replicated": {"scheme": "megatron", "cols": 2},
    "hidden, sequence": {**SEQUENCE, "keep_gathered": "none"},
    "hidden, tokens": {**SEQUENCE, "cols": 3, "keep_gathered": "none", "micro_batches": 4},
    "hidden, tokens over rows": {
        **{"scheme": "megatron_2d", "rows": 2, "cols": 2, "keep_gathered": "weights"},
        **{"dp": 2, "dp_mode": "zero1", "micro_batches": 2},
    },
    "hidden, D&SP": BRANCHES,
    # Gradients of weights are multiplied late.
    "late, sequence": {**SEQUENCE, "micro_batches": 2},
    "late, rows": {"scheme": "megatron_2d", "rows": 2, "cols": 2},
    "late, stages": {
        **{**SEQUENCE, "pp": 2, "stages_per_rank": 2, "micro_batches": 4},
        **{"dp": 2, "dp_mode": "fsdp"},
    },
    "D&SP": BRANCHES,
    "D&SP-cSub": {**BRANCHES, "common": "first"},
}
QUICK = {
    ("sequence", "Transformer", "none"),
    ("D&SP", "GPT-2", "full"),
    ("tokens", "GPT-2", "none"),
    ("hidden, grid", "GPT-2", "none"),
    ("hidden, replicated", "BERT", "none"),
    ("hidden, tokens", "GPT-2", "full"),
    ("hidden, tokens over rows", "Llama", "none"),
    ("late, sequence", "T5", "none"),
    ("late, rows", "Llama", "full"),
}


# These take NCCL's path (tests/support/multirank/nccl_path.py).
OVER_NCCL = {
    *(("hidden, grid", "none"), ("hidden, tokens over rows", "none")),
    *(("late, rows", "full"), ("late, stages", "none")),
}


def compare_in_parts(hides: bool, late: bool, *args: Any) -> dict[str, float]:
    real, cuts = summa.Gathered.chunks, []

    def watched(schedule: summa.Gathered, shape: torch.Size) -> Sequence[summa.Chunk]:
        cuts.append(real(schedule, shape))
        return cuts[-1]

    def in_three(choices: Choices, _: LayoutConfig) -> Choices:
        """Everything that travels whole travels in three chunks."""

        def cut(one: Choice) -> Choice:
            travels = choices.activation_bytes(one) or (choices.replicated and not one.common)
            return replace(one, n_chunks=3, whole_backward=hides) if travels else one

        return replace(rules._each(choices, cut), late_gradients=late)

    with patch.object(rules, "_chunked", in_three), patch.object(summa.Gathered, "chunks", watched):
        found = exactness.compare(*args)
    assert any(len(each) == 3 for each in cuts)
    return found


@pytest.mark.parametrize(
    ("name", "model", "recompute"),
    full_unless(QUICK.__contains__, [*product(LAYOUTS, MODELS, ("none", "full"))], unpack=True),
)
def test_equals_one_device(pool: WorkerPool, name: str, model: str, recompute: str) -> None:
    layout = LAYOUTS[name]
    config = {"n_layers": 2, "max_seq_len": 12, "dropout": 0.1, **MODELS[model]}
    few = {"tokens": 4, "hidden, tokens": 4, "hidden, tokens over rows": 8}
    settings = {**SETTINGS, "recompute": recompute, "global_batch": few.get(name, 24)}
    n = LayoutConfig(**layout).n_processes
    late = name.startswith("late")
    hides = late or name.startswith("hidden")
    of_rank = (compare_in_parts, hides, late, layout, config, settings, STEPS)
    nccl = (on_nccl,) if (name, recompute) in OVER_NCCL else ()
    exactness.worst_of(pool.run(n, *nccl, *of_rank))


# --------------------------------------------------- volumes


def model_in_parts(
    layout: LayoutConfig, config: ModelConfig, n_bytes: int
) -> tuple[Model, Choices]:
    with parts_of(n_bytes):
        chosen = decide(config, layout, Work(tokens=B * S, sequences=B))
    return build_parallel(
        config, layout, exactness.axes_of(layout), 1, exactness.CPU, choices=chosen
    ), chosen


def one_layer(layout: dict[str, Any], n_bytes: int) -> tuple[Volume, Volume, Choices]:
    plan, found = LayoutConfig(**layout), []
    for n_layers in (2, 1):
        model, chosen = model_in_parts(plan, exactness.tiny(n_layers=n_layers), n_bytes)
        axes = exactness.axes_of(plan)
        part = exactness.batch_of(0, CONFIG, B).chunk(axes.batch.size)[axes.batch.index]
        with gathered_weights_scope(model):
            with record_messages() as forward:
                loss = model.loss_sum(part[:, :-1], part[:, 1:])
            with record_messages() as backward:
                loss.backward()
        found.append([volume_of(each, "product") for each in (forward, backward)])
    forward_, backward_ = (two.minus(one) for two, one in zip(*found))
    return forward_, backward_, chosen


@pytest.mark.parametrize(
    "layout", [GRID, {**GRID, "stationary": "input"}, SEQUENCE], ids=["grid", "input", "sequence"]
)
def test_volumes_are_the_same_in_more_messages(pool: WorkerPool, layout: dict[str, Any]) -> None:
    layout = {**layout, "keep_gathered": "none"}
    n = LayoutConfig(**layout).n_processes
    for forward, backward, chosen in pool.run(n, one_layer, layout, 2000):
        assert max(choice.n_chunks for choice in chosen.products.values()) > 2
        said = predicted(chosen)
        agrees(forward, said[0])
        agrees(backward, said[1])
        with patch.object(rules, "CHUNK_BYTES", 1 << 30):
            whole = decide(CONFIG, LayoutConfig(**layout), Work(tokens=B * S, sequences=B))
        for some, once in zip(said, predicted(whole)):
            assert (some.col, some.row) == (once.col, once.row)
            assert some.messages > once.messages


# --------------------------------------------------- memory


def chunked_loss(run: RunConfig, n_bytes: int) -> tuple[int, int]:
    with parts_of(n_bytes):
        return measured(run)


@pytest.mark.parametrize(
    "layout",
    full_unless(lambda layout: layout is SEQUENCE, [GRID, SEQUENCE]),
    ids=["grid", "sequence"],
)
def test_estimated_is_measured_and_less(pool: WorkerPool, layout: dict[str, Any]) -> None:
    run = a_run({**layout, "keep_gathered": "none"}, {}, {"recompute": "full"})
    whole = estimate_rank(run, 0).peak
    with parts_of(20_000) as decided:
        agrees_of(pool, run, chunked_loss, 20_000)
        assert estimate_rank(run, 0).peak < whole
    assert max(c.n_chunks for found in decided for c in found.products.values()) > 2


# --------------------------------------------------- precision


def weight_gradient(dtype: str, n_bytes: int) -> torch.Tensor:
    layout = LayoutConfig(**GRID)
    with parts_of(n_bytes):
        chosen = decide(CONFIG, layout, Work(tokens=B * S, sequences=B))
    axes = exactness.axes_of(layout)
    model = build_parallel(CONFIG, layout, axes, 1, exactness.CPU, choices=chosen)
    linear = next(m for m in model.modules() if isinstance(m, GridLinear) and m.output_stationary)
    n_chunks = getattr(linear.schedule, "n_chunks", 1)
    assert (n_chunks > 8) == (n_bytes < 1 << 20)
    generator = torch.Generator().manual_seed(axes.world.index)
    k = linear.weight.shape[0] * axes.row.size // axes.col.size
    x = torch.randn(B // 2, S, k, generator=generator).to(getattr(torch, dtype))
    y = linear(x)
    y.backward(torch.ones_like(y))
    assert linear.weight.grad is not None
    return linear.weight.grad.double()


def test_chunks_are_accumulated_as_precisely_as_one_product(pool: WorkerPool) -> None:
    """In bfloat16, a sum of many chunks in that type would lose what one product keeps."""
    want = pool.run(4, weight_gradient, "float32", 1 << 30)
    for n_bytes in (100, 1 << 30):
        got = pool.run(4, weight_gradient, "bfloat16", n_bytes)
        off = max(float((a - b).norm() / b.norm()) for a, b in zip(got, want))
        assert off < 4e-3, n_bytes


# --------------------------------------------------- the loss


ROWS, S_LOSS, V = 16, 24, 960
WIDE = exactness.tiny(n_layers=1, vocab_size=V, hidden_size=12, n_heads=4)
H = WIDE.hidden_size
OPTIMUS: Layout = {"scheme": "optimus", "rows": 2, "cols": 2, "keep_gathered": "none"}
LOSSES: dict[str, Layout] = {
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
    model, axes, _ = exactness.built(layout, WIDE)
    model.train()
    model.loss_chunk_tokens = tokens
    rows = slice(
        axes.row.index * ROWS // axes.row.size, (axes.row.index + 1) * ROWS // axes.row.size
    )
    batch = {key: value[rows] for key, value in exactness.batches_of(0, WIDE, ROWS).items()}
    with gathered_weights_scope(model), MemoryLog() as tracker, record_messages() as recorder:
        tracker.mark([*model.parameters(), *batch.values()], "before")
        hidden = model.hidden(batch).detach().requires_grad_()
        start, before, sent = len(tracker.log), tracker.live(), len(recorder.records)
        model.losses_of(hidden, batch)["tokens"].backward()
    moved: Counter[tuple[str, str]] = Counter()
    for r in recorder.records[sent:]:
        moved[r.axis, r.op] += int(r.moved)
    largest = max(change.n_bytes for change in tracker.log[start:])
    peak = int(tracker.curve()[start + 1 :].max())
    return largest, peak - before, moved


@pytest.mark.parametrize(
    "name", full_unless(lambda name: name not in ("pipelined", "gather, weights kept"), LOSSES)
)
def test_a_rank_holds_few_chunks_of_its_logits(pool: WorkerPool, name: str) -> None:
    """The largest tensor is a chunk's logits; besides the table less than three of them live.

    A rank has v/c columns of the logits of b s / r tokens (or partial sums of all v). The table may
    exist gathered, as a chunk's gradient, as their sum, and in flight.
    """
    tokens, layout = 64, LOSSES[name]
    rows, cols = layout.get("rows", 1), layout["cols"]
    columns = V if "input" in name else V // cols
    table, x = V * H // cols * 4, ROWS * S_LOSS * H // rows * 4
    for largest, peak, _ in pool.run(4, loss, layout, 0):
        assert largest == ROWS * S_LOSS // rows * columns * 4
        # the logits and their gradient; earlier tensors may have been freed
        assert peak >= 1.5 * largest
    for largest, peak, _ in pool.run(4, loss, layout, tokens):
        part = tokens * columns * 4
        assert largest == part
        assert part < ROWS * S_LOSS // rows * columns * 4 / 2
        assert peak <= 3 * part + 4 * table + 4 * x


@pytest.mark.parametrize("name", ["sequence", "gather", "gather, input stays"])
def test_the_table_travels_once_for_all_chunks(pool: WorkerPool, name: str) -> None:
    """The table is gathered once and its gradient is summed once.

    Without chunks, it is gathered again for the gradient of the head's input.
    """
    layout = LOSSES[name]
    block = V * H // 4 if layout["scheme"] == "optimus" else 0
    whole, some, many = (pool.run(4, loss, layout, tokens) for tokens in (0, 64, 16))
    for (_, _, before), (_, _, one), (_, _, other) in zip(whole, some, many):
        assert one == other, "the number of parts does not matter"
        assert before["row", "all_gather"] == 2 * block
        assert one["row", "all_gather"] == block
        assert one["row", "reduce_scatter"] == before["row", "reduce_scatter"] == block
        assert one["col", "all_gather"] <= before["col", "all_gather"]
