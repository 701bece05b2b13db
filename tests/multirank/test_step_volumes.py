"""Counts what an optimizer step sends: micro-batches, buckets of gradients, copies of vectors."""

import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Any
from unittest.mock import patch

import pytest
import torch

from gridformer.comm import Recorder, record_messages
from gridformer.config import LayoutConfig, TrainConfig
from gridformer.data.samples.order import Rows
from gridformer.mesh import Axes
from gridformer.models import Model
from gridformer.parallel import build_parallel
from gridformer.parallel.auto.cost import Choices, Traffic
from gridformer.parallel.auto.heuristics import decide
from gridformer.parallel.auto.products import Work
from gridformer.parallel.data import buckets as bucketing
from gridformer.parallel.data import gradients as reductions
from gridformer.parallel.sharding import shard_of
from gridformer.train.step import Stepper
from gridformer.utils.batch import Batch, next_words
from tests.support.marks import full_unless
from tests.support.multirank.exactness import CPU, axes_of, batch_of, tiny
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.volumes import (
    CONFIG,
    B,
    H,
    S,
    V,
    Volume,
    agrees,
    optimus,
    short,
    volume_of,
)


@dataclass
class StepTraffic:
    """Traffic of one rank in one optimizer step, and the sizes of what it holds.

    Attributes:
        copied: By axis, this rank's index and the elements that it holds copies of.
    """

    products: Volume
    volume: Volume
    by_axis_and_label: dict[tuple[str, str], Volume]
    copied: dict[str, tuple[int, int]]
    owned_sizes: list[tuple[str, int]]  # the layer, and the elements
    owned_late: list[bool]  # whether the owners of copies sum the copies' gradients first


def one_step(
    layout: dict[str, Any], micro_batches: int, bucket_bytes: int, vocab_size: int = V
) -> StepTraffic:
    torch.set_num_threads(1)
    plan = LayoutConfig(**layout)
    axes, config = axes_of(plan), tiny(vocab_size=vocab_size)
    model = build_parallel(config, plan, axes, 1, CPU)
    settings = TrainConfig(global_batch=B)
    plan = plan.model_copy(update={"micro_batches": micro_batches})
    batch = batch_of(0, config, B)

    def read(rows: Rows) -> Batch:
        return next_words(batch[rows])

    with patch.object(bucketing, "BUCKET_BYTES", bucket_bytes), record_messages() as recorder:
        stepper = Stepper(model, settings, axes, plan)
        stepper(0, read)
    groups: dict[tuple[str, str], list[Any]] = {}
    for r in recorder.records:
        groups.setdefault((r.axis, r.label), []).append(r)
    return StepTraffic(
        volume_of(recorder, "product"),
        volume_of(recorder),
        {key: volume_of(Recorder(records)) for key, records in groups.items()},
        _copied(model, axes),
        [(_layer_of(name), p.numel()) for name, p in reductions.owned(model)],
        [shard_of(p).partial for _, p in reductions.owned(model)],
    )


def _layer_of(name: str) -> str:
    return name.split(".")[1] if name.startswith("layers.") else ""


def _copied(model: Model, axes: Axes) -> dict[str, tuple[int, int]]:
    copied: dict[str, tuple[int, int]] = {}
    for parameter in model.parameters():
        name = shard_of(parameter).copies
        if name:
            before = copied.get(name, (0, 0))[1]
            copied[name] = axes[name].index, before + parameter.numel()
    return copied


# All products of a step of several micro-batches, by the formulas of choices and the embedding's.
WHOLE_STEPS = [
    ({"scheme": "megatron", "cols": 2, "keep_gathered": "none"}, 1),
    ({"scheme": "megatron", "cols": 4, "sequence_parallel": True, "keep_gathered": "inputs"}, 3),
    ({"scheme": "megatron_2d", "rows": 2, "cols": 2, "keep_gathered": "none"}, 2),
    ({"scheme": "megatron_2d", "rows": 2, "cols": 3, "keep_gathered": "weights"}, 3),
    (optimus((2, 2), keep_gathered="none"), 2),
    (optimus((2, 2), keep_gathered="weights"), 1),
    (optimus((2, 2), keep_gathered="weights"), 3),
    (optimus((2, 2), keep_gathered="all", stationary="output"), 2),
    (optimus((2, 2), keep_gathered="all", stationary="input"), 3),
    (optimus((2, 2), schedule="pipelined", keep_gathered="all"), 2),
    (optimus((1, 4), keep_gathered="all"), 3),
    (optimus((4, 1), keep_gathered="all"), 3),
    (optimus((2, 3), keep_gathered="weights"), 3),
    (optimus((2, 3), schedule="broadcast", stationary="input"), 2),
]


def embedding(choices: Choices, vocab_size: int) -> Traffic:
    """Return the embedding's traffic in one step.

    `Choices` covers the head, which reads the same table. In forward, the embedding's result is
    summed, unless the table lies as in the paper; in backward, the gradient is made whole. The
    table travels as for the head; a kept table travels once for both, and that counts for the head.
    """
    rows, cols, head = choices.rows, choices.cols, choices["head"]
    m, steps = choices.work.micro_batches, 1
    if head.schedule != "gather":
        steps = rows + cols - math.gcd(rows, cols)
    summed = (cols - 1) / (rows * cols) * choices.work.tokens * H
    table = (rows - 1) / (rows * cols) * vocab_size * H
    # How often each of them travels in one micro-batch.
    if choices.replicated:
        on_col, col_messages = 2, 1
    elif head.stationary == "output":
        on_col, col_messages = 2, 2
    else:
        on_col, col_messages = 0, 0
    on_row = 1 if head.keep_weight else 2
    messages = col_messages * (cols > 1) + on_row * (rows > 1)
    return Traffic(m * on_col * summed, m * on_row * table, m * steps * messages)


@pytest.mark.parametrize(
    ("layout", "micro_batches"), WHOLE_STEPS, ids=lambda x: short(x) if isinstance(x, dict) else ""
)
def test_step_traffic_equals_the_prediction(
    pool: WorkerPool, layout: dict[str, Any], micro_batches: int
) -> None:
    """The step has several micro-batches, in which a kept weight travels once."""
    plan, vocab_size = LayoutConfig(**layout), 96  # divisible over all grids
    work = Work(tokens=B // micro_batches * S, micro_batches=micro_batches)
    choices = decide(tiny(vocab_size=vocab_size), plan, work)
    said = embedding(choices, vocab_size)
    for choice in choices.products.values():
        said = said + choices.step(choice)
    for one in pool.run(plan.n_processes, one_step, layout, micro_batches, LARGE, vocab_size):
        agrees(one.products, said)


LARGE = 25 << 20
# For one device: the axes over which it holds copies of vectors, with their elements.
N = CONFIG.n_layers
NORMS = 2 * H * (2 * N + 1)  # weight and bias of each norm
BIASES = N * (3 * H + H + 4 * H + H)
POSITIONS = CONFIG.max_seq_len * H
CLOSING = 2 * N * H  # biases added to whole activations between sections
STEPS: list[tuple[dict[str, Any], dict[str, int]]] = [
    ({"scheme": "megatron", "cols": 2}, {"col": NORMS + CLOSING + POSITIONS}),
    ({"scheme": "megatron", "cols": 2, "dp": 2}, {"col": NORMS + CLOSING + POSITIONS}),
    ({"scheme": "megatron", "cols": 4, "sequence_parallel": True},
        {"col": NORMS + CLOSING + POSITIONS}),
    ({"scheme": "megatron_2d", "rows": 2, "cols": 2},
        {"row": (BIASES - CLOSING) // 2, "grid": NORMS + CLOSING + POSITIONS}),
    (optimus((2, 2)), {"row": (BIASES + POSITIONS + NORMS) // 2}),
    (optimus((2, 2), stationary="input"), {"row": (BIASES + POSITIONS + NORMS) // 2}),
    (optimus((2, 2), schedule="pipelined"), {"row": (BIASES + POSITIONS + NORMS) // 2}),
    (optimus((1, 4)), {}),
    (optimus((4, 1)), {"row": BIASES + POSITIONS + NORMS}),
    ({**optimus((2, 2)), "dp": 2}, {"row": (BIASES + POSITIONS + NORMS) // 2}),
    ({"scheme": "single", "dp": 2}, {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "copies"), STEPS, ids=lambda x: short(x) if "scheme" in x else ""
)
@pytest.mark.parametrize("micro_batches", full_unless(lambda n: n == 3, [1, 3]))
def test_one_message_a_step_and_purpose(
    pool: WorkerPool, layout: dict[str, Any], copies: dict[str, int], micro_batches: int
) -> None:
    """Copies' gradients and values travel in one message per step and axis that has copies.

    They do not travel in one message per layer or micro-batch.
    """
    rows, cols, dp = (layout.get(name, 1) for name in ("rows", "cols", "dp"))
    partial = layout["scheme"] in ("optimus", "megatron_2d") or "sequence_parallel" in layout
    traffic = pool.run(rows * cols * dp, one_step, layout, micro_batches, LARGE)
    for rank, one in enumerate(traffic):
        places = {"row": rank // cols % rows, "col": rank % cols, "grid": rank % (rows * cols)}
        assert one.copied == {name: (places[name], n) for name, n in copies.items()}
        # Sums over dp start during backward, bucket by bucket; those of copies' owners start after
        # it.
        summed = [size for size, late in zip(one.owned_sizes, one.owned_late) if not late]
        over_dp = [*buckets_of(summed, LARGE), *[one.owned_late] * any(one.owned_late)]
        over_dp *= dp > 1
        for name, elements in copies.items():
            received = elements if places[name] else 0
            values = one.by_axis_and_label[name, "copies"]
            assert values.count["copies"] == Counter(broadcast=1)
            assert values.moved["copies"] == received
            if partial:
                gradients = one.by_axis_and_label[name, "gradients"]
                assert gradients.count["gradients"] == Counter(reduce=1)
                assert gradients.moved["gradients"] == received
        if dp > 1:
            gradients = one.by_axis_and_label["dp", "gradients"]
            assert gradients.count["gradients"] == Counter(all_reduce=len(over_dp))
            owned = sum(size for _, size in one.owned_sizes)
            assert gradients.moved["gradients"] == Fraction(2 * (dp - 1), dp) * owned
        wanted = Counter(broadcast=len(copies))
        assert one.volume.count.get("copies", Counter()) == +wanted
        wanted = Counter(reduce=len(copies) * partial, all_reduce=len(over_dp))
        assert one.volume.count.get("gradients", Counter()) == +wanted
        assert one.volume.count["metrics"] == Counter(all_reduce=2)


def buckets_of(sizes: list[tuple[str, int]], limit: int) -> list[int]:
    """Return the bytes of the buckets of float32 gradients.

    A large tensor is a bucket by itself. Others of a layer fill buckets until the next one would
    exceed the limit, and so do those outside layers.

    Args:
        sizes: The layer of each tensor, empty outside of layers, and its elements.
        limit: The most bytes of a bucket.
    """
    buckets: list[int] = []
    filled: dict[str, int] = {}
    for layer, size in reversed(sizes):
        if 4 * size >= limit:
            buckets.append(4 * size)
            continue
        if layer in filled and filled[layer] + 4 * size > limit:
            buckets.append(filled.pop(layer))
        filled[layer] = filled.get(layer, 0) + 4 * size
    return [*buckets, *filled.values()]


def test_gradients_travel_in_buckets(pool: WorkerPool) -> None:
    """A large tensor is a bucket by itself; small ones share one."""
    limit = 20_000  # bytes; the largest matrices are larger, and the vectors far smaller
    for one in pool.run(2, one_step, {"scheme": "single", "dp": 2}, 1, limit):
        buckets = buckets_of(one.owned_sizes, limit)
        assert max(buckets) > limit
        assert len(buckets) > 3
        assert one.volume.count["gradients"] == Counter(all_reduce=len(buckets))
        assert one.volume.moved["gradients"] == sum(size for _, size in one.owned_sizes)
