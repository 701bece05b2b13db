"""What travels, counted: the specification's volumes exactly, on every rank (sections 2 and 3).

Models of three and of two layers are run; their difference is one layer, without what the
embedding, the last norm, the head and the loss move.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from gridformer.comm import Axes, Recorder, record
from gridformer.config import LayoutConfig, TrainConfig
from gridformer.layout import build_axes
from gridformer.models import GPT2
from gridformer.parallel import build_parallel, gradients
from gridformer.parallel.placement import shard_of
from gridformer.train.step import Stepper
from tests.multirank.exactness import CPU, batch_of, tiny
from tests.multirank.pool import WorkerPool, group_cache

B = 12  # sequences, divides over 1, 2, 3 and 4
CONFIG = tiny()
S, H = CONFIG.max_seq_len, CONFIG.hidden_size
BSH = B * S * H

MEGATRON = [(cols, sequence) for cols in (2, 4) for sequence in (False, True)]
GRIDS = [(1, 4), (4, 1), (2, 2), (2, 3), (3, 3)]


@dataclass
class Volume:
    """Of one rank and one pass: elements by label, messages by label and kind, elements by axis."""

    moved: dict[str, Fraction]
    count: dict[str, Counter[str]]
    by_axis: dict[str, Fraction]

    @staticmethod
    def of(recorder: Recorder) -> Volume:
        volume = Volume({}, {}, {})
        for r in recorder.records:
            moved = Fraction(r.moved).limit_denominator(1000)
            volume.moved[r.label] = volume.moved.get(r.label, Fraction()) + moved
            volume.by_axis[r.axis] = volume.by_axis.get(r.axis, Fraction()) + moved
            volume.count.setdefault(r.label, Counter())[r.op] += 1
        for label, moved in volume.moved.items():
            assert math.isclose(recorder.moved(label), moved, rel_tol=1e-12)
            assert recorder.count(label) == volume.count[label]
        for axis, moved in volume.by_axis.items():
            assert math.isclose(recorder.moved(axis=axis), moved, rel_tol=1e-12)
        return volume

    def minus(self, other: Volume) -> Volume:
        def less(a: dict[str, Fraction], b: dict[str, Fraction]) -> dict[str, Fraction]:
            return {k: v - b.get(k, 0) for k, v in a.items() if v != b.get(k, 0)}

        count = {k: c - other.count.get(k, Counter()) for k, c in self.count.items()}
        return Volume(
            less(self.moved, other.moved),
            {k: c for k, c in count.items() if c},
            less(self.by_axis, other.by_axis),
        )


def axes_of(layout: LayoutConfig) -> Axes:
    key = layout.model_dump_json()
    if key not in group_cache():
        group_cache()[key] = build_axes(layout, "cpu")
    axes: Axes = group_cache()[key]
    return axes


def build(layout: LayoutConfig, n_layers: int) -> tuple[GPT2, Axes]:
    axes = axes_of(layout)
    return build_parallel(tiny(n_layers=n_layers), layout, axes, 1, CPU), axes


def passes(layout: LayoutConfig, n_layers: int) -> tuple[Volume, Volume]:
    """Forward and backward of one batch on one rank."""
    model, axes = build(layout, n_layers)
    part = batch_of(0, CONFIG, B).chunk(axes.row.size)[axes.row.index]
    with record() as forward:
        loss = model.loss_sum(part[:, :-1], part[:, 1:])
    with record() as backward:
        loss.backward()
    assert forward.bytes() == 4 * forward.moved()  # everything is float32
    return Volume.of(forward), Volume.of(backward)


def one_layer(layout: dict[str, Any]) -> tuple[Volume, Volume]:
    plan = LayoutConfig(**layout)
    three, two = passes(plan, 3), passes(plan, 2)
    return three[0].minus(two[0]), three[1].minus(two[1])


@pytest.mark.parametrize(("cols", "sequence"), MEGATRON)
def test_megatron_layer(pool: WorkerPool, cols: int, sequence: bool) -> None:
    layout = {"scheme": "megatron", "cols": cols, "sequence_parallel": sequence}
    total = Fraction(4 * (cols - 1), cols) * BSH  # 2 all-reduces of bsh, or their two halves
    halves = {"enter": total / 2, "leave": total / 2}
    for forward, backward in pool.run(cols, one_layer, layout):
        assert sum(forward.moved.values()) == sum(backward.moved.values()) == total
        assert forward.by_axis == backward.by_axis == {"col": total}
        if sequence:
            assert forward.moved == backward.moved == halves
            # Forward gathers on entering, backward gathers what left.
            gathers, scatters = Counter(all_gather=2), Counter(reduce_scatter=2)
            assert forward.count == {"enter": gathers, "leave": scatters}
            assert backward.count == {"enter": scatters, "leave": gathers}
        else:
            assert forward.count == {"leave": Counter(all_reduce=2)}
            assert backward.count == {"enter": Counter(all_reduce=2)}


@pytest.mark.parametrize(("rows", "cols"), GRIDS)
def test_optimus_layer(pool: WorkerPool, rows: int, cols: int) -> None:
    activations = Fraction(cols - 1, rows * cols) * 7 * BSH
    weights = Fraction(rows - 1, rows * cols) * 12 * H**2
    layout = {"scheme": "optimus", "rows": rows, "cols": cols}
    for forward, backward in pool.run(rows * cols, one_layer, layout):
        assert forward.moved.pop("product") == activations + weights
        assert backward.moved.pop("product") == 2 * (activations + weights)
        norm = 2 * 2 * Fraction(B * S, rows)  # two norms, two numbers a token
        gathered, reduced = (cols - 1) * norm, Fraction(2 * (cols - 1), cols) * norm
        assert forward.moved == ({"norm": gathered} if cols > 1 else {})
        assert backward.moved == ({"norm": reduced} if cols > 1 else {})
        along_rows = {"row": weights} if rows > 1 else {}
        assert forward.by_axis.pop("row", 0) == along_rows.get("row", 0)
        assert backward.by_axis.pop("row", 0) == 2 * along_rows.get("row", 0)
        assert forward.by_axis.pop("col", 0) == activations + (gathered if cols > 1 else 0)
        assert backward.by_axis.pop("col", 0) == 2 * activations + (reduced if cols > 1 else 0)


@pytest.mark.parametrize(("rows", "cols"), GRIDS)
def test_optimus_messages(pool: WorkerPool, rows: int, cols: int) -> None:
    """Four products a layer, each a loop over the panels."""
    panels = rows + cols - math.gcd(rows, cols)
    axes = (rows > 1) + (cols > 1)  # of those that have anybody to talk to
    layout = {"scheme": "optimus", "rows": rows, "cols": cols}
    norm = {"norm": Counter(all_gather=2)} if cols > 1 else {}
    norm_back = {"norm": Counter(all_reduce=2)} if cols > 1 else {}
    each = 4 * panels * axes
    for forward, backward in pool.run(rows * cols, one_layer, layout):
        assert forward.count == {"product": Counter(broadcast=each), **norm}
        # dA = dC Bt and dB = At dC: one panel broadcast and one panel reduced, in each step.
        assert backward.count == {"product": Counter(broadcast=each, reduce=each), **norm_back}


def whole_model(layout: dict[str, Any]) -> tuple[Volume, Volume]:
    return passes(LayoutConfig(**layout), 1)


@pytest.mark.parametrize(
    "layout",
    [
        {"scheme": "megatron", "cols": 2},
        {"scheme": "megatron", "cols": 4, "sequence_parallel": True},
        {"scheme": "optimus", "rows": 1, "cols": 4},
        {"scheme": "optimus", "rows": 2, "cols": 3},
        {"scheme": "optimus", "rows": 4, "cols": 1},
    ],
    ids=str,
)
def test_loss_moves_three_numbers_a_token(pool: WorkerPool, layout: dict[str, Any]) -> None:
    """Never the logits: three all-reduces of b*s numbers forward, nothing backward."""
    rows, cols = layout.get("rows", 1), layout["cols"]
    tokens = Fraction(B * S, rows)
    for forward, backward in pool.run(rows * cols, whole_model, layout):
        if cols > 1:
            assert forward.count["loss"] == Counter(all_reduce=3)
            assert forward.moved["loss"] == 3 * Fraction(2 * (cols - 1), cols) * tokens
        else:
            assert "loss" not in forward.count
        assert "loss" not in backward.count


# --------------------------------------------------------------------------- once a step


@dataclass
class StepTraffic:
    """Of one rank and one optimizer step, by label; and the sizes of what it holds."""

    volume: Volume
    owned: int
    vectors: int
    owned_sizes: list[int]


def one_step(layout: dict[str, Any], micro_batches: int, bucket_bytes: int) -> StepTraffic:
    model, axes = build(LayoutConfig(**layout), 2)
    settings = TrainConfig(global_batch=B, micro_batches=micro_batches)
    stepper = Stepper(model, settings, axes)
    batch = batch_of(0, CONFIG, B)

    def read(rows: slice) -> Tensor:
        return batch[rows]

    with patch.object(gradients, "_BUCKET_BYTES", bucket_bytes), record() as recorder:
        stepper(0, read)
    sizes = [p.numel() for _, p in gradients.owned(model)]
    copied = sum(p.numel() for p in model.parameters() if shard_of(p).copies)
    return StepTraffic(Volume.of(recorder), sum(sizes), copied, sizes)


LARGE = 25 << 20
STEPS = [
    {"scheme": "megatron", "cols": 2},
    {"scheme": "megatron", "cols": 2, "dp": 2},
    {"scheme": "megatron", "cols": 4, "sequence_parallel": True},
    {"scheme": "optimus", "rows": 2, "cols": 2},
    {"scheme": "optimus", "rows": 1, "cols": 4},
    {"scheme": "optimus", "rows": 2, "cols": 2, "dp": 2},
    {"scheme": "single", "dp": 2},
]


@pytest.mark.parametrize("layout", STEPS, ids=str)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_one_message_a_step_and_purpose(
    pool: WorkerPool, layout: dict[str, Any], micro_batches: int
) -> None:
    """Copies' gradients and values travel in one message a step, not one a layer or micro-batch."""
    rows, cols, dp = (layout.get(name, 1) for name in ("rows", "cols", "dp"))
    copies_over = "row" if layout["scheme"] == "optimus" else "col"
    n_copies = {"row": rows, "col": cols}[copies_over]
    partial = n_copies > 1 and (layout["scheme"] == "optimus" or "sequence_parallel" in layout)
    traffic = pool.run(rows * cols * dp, one_step, layout, micro_batches, LARGE)
    for rank, one in enumerate(traffic):
        want: Counter[str] = Counter()
        moved = Fraction(2 * (dp - 1), dp) * one.owned
        index = rank % cols if copies_over == "col" else rank // cols % rows
        if partial:
            want["reduce"] = 1
            moved += one.vectors if index else 0
        if dp > 1:
            want["all_reduce"] = 1
        assert one.volume.count.get("gradients", Counter()) == want
        assert one.volume.moved.get("gradients", 0) == moved
        copies = Counter(broadcast=1) if n_copies > 1 else Counter()
        assert one.volume.count.get("copies", Counter()) == copies
        received = one.vectors if n_copies > 1 and index else 0
        assert one.volume.moved.get("copies", 0) == received
        assert one.volume.count["metrics"] == Counter(all_reduce=2)


def test_gradients_travel_in_buckets(pool: WorkerPool) -> None:
    """A bucket is filled until the next tensor would exceed it; a large tensor is one by itself."""
    limit = 20_000  # bytes; the largest matrices are larger, the vectors are far smaller
    for one in pool.run(2, one_step, {"scheme": "single", "dp": 2}, 1, limit):
        buckets: list[int] = []
        for size in one.owned_sizes:
            if buckets and buckets[-1] + 4 * size <= limit:
                buckets[-1] += 4 * size
            else:
                buckets.append(4 * size)
        assert max(buckets) > limit
        assert len(buckets) > 3
        assert one.volume.count["gradients"] == Counter(all_reduce=len(buckets))
        assert one.volume.moved["gradients"] == one.owned
