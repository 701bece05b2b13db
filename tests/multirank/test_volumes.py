"""What travels, counted: the specification's volumes exactly, on every rank (sections 2 and 3).

Models of two and of one layer are run; their difference is one layer, without what the embedding,
the last norm, the head and the loss move.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from gridformer.comm import Axes, Recorder, record
from gridformer.config import LayoutConfig, TrainConfig
from gridformer.models import GPT2
from gridformer.parallel import build_parallel
from gridformer.parallel import gradients as reductions
from gridformer.parallel.choices import Choices, Traffic, Work, decide
from gridformer.parallel.grid import weights_kept
from gridformer.parallel.placement import shard_of
from gridformer.train.step import Stepper
from tests.multirank.exactness import CPU, axes_of, batch_of, tiny
from tests.multirank.pool import WorkerPool

B = 12  # sequences, divides over 1, 2, 3 and 4
CONFIG = tiny()
S, H, V = CONFIG.max_seq_len, CONFIG.hidden_size, CONFIG.vocab_size
BSH = B * S * H
LAYER = ("qkv", "out", "up", "down")

MEGATRON = [(cols, sequence) for cols in (2, 4) for sequence in (False, True)]
GRIDS = [(1, 4), (4, 1), (2, 2), (2, 3), (3, 3)]

# Of the four products of a layer: b s h that travel along the rows, forward.
WIDTHS = {"auto": 1 + 1 + 1 + 1, "output": 1 + 1 + 1 + 4, "input": 3 + 1 + 4 + 1}
# Whose input stays: of qkv, out, up and down.
INPUT_STAYS = {"auto": 2, "output": 0, "input": 4}


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


def volume_of(recorder: Recorder, label: str = "") -> Volume:
    """Of all records, or those of one label."""
    return Volume.of(Recorder([r for r in recorder.records if r.label == label or not label]))


def passes(layout: LayoutConfig, n_layers: int) -> tuple[Recorder, Recorder]:
    """Forward and backward of one batch on one rank."""
    return _passes(layout.model_dump_json(), n_layers)


@cache  # by a worker: what travels is the same every time
def _passes(layout_json: str, n_layers: int) -> tuple[Recorder, Recorder]:
    torch.set_num_threads(1)
    layout = LayoutConfig.model_validate_json(layout_json)
    axes = axes_of(layout)
    model = build_parallel(tiny(n_layers=n_layers), layout, axes, 1, CPU)
    part = batch_of(0, CONFIG, B).chunk(axes.row.size)[axes.row.index]
    with weights_kept(model):
        with record() as forward:
            loss = model.loss_sum(part[:, :-1], part[:, 1:])
        with record() as backward:
            loss.backward()
    assert forward.bytes() == 4 * forward.moved()  # everything is float32
    return forward, backward


def one_layer(layout: dict[str, Any], label: str = "") -> tuple[Volume, Volume]:
    """Forward and backward; `label` narrows it to messages of one purpose."""
    plan = LayoutConfig(**layout)
    two, one = passes(plan, 2), passes(plan, 1)
    forward, backward = (volume_of(a, label).minus(volume_of(b, label)) for a, b in zip(two, one))
    return forward, backward


def optimus(grid: tuple[int, int], **how: str) -> dict[str, Any]:
    """A layout that leaves nothing to `auto` but what is asked for."""
    rows, cols = grid
    fixed = {"schedule": "gather", "keep_gathered": "none"}
    return {"scheme": "optimus", "rows": rows, "cols": cols, **fixed, **how}


def along(axis_sizes: tuple[int, int], col: Fraction, row: Fraction) -> dict[str, Fraction]:
    """By axis, without axes of one device."""
    rows, cols = axis_sizes
    return {k: v for k, v, n in (("col", col, cols), ("row", row, rows)) if n > 1}


# --------------------------------------------------------------------------- one layer, in figures


@pytest.mark.parametrize("keep", ["none", "inputs"])
@pytest.mark.parametrize(("cols", "sequence"), MEGATRON)
def test_megatron_layer(pool: WorkerPool, cols: int, sequence: bool, keep: str) -> None:
    layout = {"scheme": "megatron", "cols": cols, "sequence_parallel": sequence}
    unit = Fraction(cols - 1, cols) * BSH
    for forward, backward in pool.run(cols, one_layer, {**layout, "keep_gathered": keep}):
        if not sequence:  # two all-reduces of bsh each way
            want = {"col": 4 * unit}
            counts = Counter(all_reduce=2), Counter(all_reduce=2)
            assert forward.by_axis == backward.by_axis == want
        else:  # their halves; inputs that were not kept are gathered again
            again = 2 if keep == "none" else 0
            assert forward.by_axis == {"col": 4 * unit}
            assert backward.by_axis == {"col": (4 + again) * unit}
            counts = (
                Counter(all_gather=2, reduce_scatter=2),
                Counter(all_gather=2 + again, reduce_scatter=2),
            )
        assert (forward.count, backward.count) == tuple({"product": count} for count in counts)


@pytest.mark.parametrize("stationary", ["auto", "output", "input"])
@pytest.mark.parametrize("schedule", ["broadcast", "pipelined", "gather"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_optimus_layer(
    pool: WorkerPool, grid: tuple[int, int], schedule: str, stationary: str
) -> None:
    """Forward (c-1)/(rc) of 4, 7 or 9 bsh, and (r-1)/(rc) of 12h². Backward at most twice that:
    one gather of a layer's gradients serves both products that need it."""
    rows, cols = grid
    layout = optimus(grid, schedule=schedule, stationary=stationary)
    unit = Fraction(cols - 1, rows * cols) * BSH
    weights = Fraction(rows - 1, rows * cols) * 12 * H**2
    normed_inside = schedule == "gather" and stationary != "input"
    # Two norms, two numbers a token.
    norm = Fraction(0) if normed_inside else 2 * 2 * Fraction(B * S, rows)
    gathered, reduced = (cols - 1) * norm, Fraction(2 * (cols - 1), cols) * norm
    width = back = WIDTHS[stationary]
    if schedule != "gather":
        back = 2 * width
    elif stationary != "input":  # what was gathered is gathered again, and its gradient scattered
        back = {"auto": 2 + 1 + 2 + 1, "output": 2 * 7}[stationary]
    for forward, backward in pool.run(rows * cols, one_layer, layout):
        assert forward.by_axis == along(grid, width * unit + gathered, weights)
        assert backward.by_axis == along(grid, back * unit + reduced, 2 * weights)
        assert forward.moved.get("norm", 0) == gathered
        assert backward.moved.get("norm", 0) == reduced
        assert forward.moved.keys() <= {"product", "norm"}


@pytest.mark.parametrize("stationary", ["auto", "output", "input"])
@pytest.mark.parametrize("schedule", ["broadcast", "pipelined"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_messages_panel_by_panel(
    pool: WorkerPool, grid: tuple[int, int], schedule: str, stationary: str
) -> None:
    """Each product is a loop over the panels, and each step sends at most one message an axis."""
    rows, cols = grid
    panels = rows + cols - math.gcd(rows, cols)
    norm = {"norm": Counter(all_gather=2)} if cols > 1 else {}
    norm_back = {"norm": Counter(all_reduce=2)} if cols > 1 else {}
    col, row = panels * (cols > 1), panels * (rows > 1)
    summed = INPUT_STAYS[stationary]
    layout = optimus(grid, schedule=schedule, stationary=stationary)
    for forward, backward in pool.run(rows * cols, one_layer, layout):
        kinds = Counter(broadcast=4 * row + (4 - summed) * col, reduce=summed * col)
        assert forward.count == {"product": +kinds, **norm}
        # dA = dC Bt and dB = At dC; where the input stays dA = dC B and dB = dCt A.
        kinds = Counter(
            broadcast=4 * row + 4 * col + summed * col,
            reduce=4 * row + (4 - summed) * col,
        )
        assert backward.count == {"product": +kinds, **norm_back}


@pytest.mark.parametrize(("stationary", "norms"), [("auto", 0), ("output", 0), ("input", 2)])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_messages_of_gather(
    pool: WorkerPool, grid: tuple[int, int], stationary: str, norms: int
) -> None:
    """Two a product: 8 a layer where the original sends 28, and 12 with norms would be allowed.
    A norm sends nothing where the product that reads it gathers its rows."""
    rows, cols = grid
    col, row = int(cols > 1), int(rows > 1)
    summed = INPUT_STAYS[stationary]
    for forward, backward in pool.run(rows * cols, one_layer, optimus(grid, stationary=stationary)):
        product = Counter(all_gather=4 * row + (4 - summed) * col, reduce_scatter=summed * col)
        norm = {"norm": Counter(all_gather=norms)} if norms * col else {}
        assert forward.count == {"product": +product, **norm}
        total = sum(sum(count.values()) for count in forward.count.values())
        assert total == 4 * row + (4 + norms) * col <= 10
        product = Counter(all_gather=4 * row + 4 * col, reduce_scatter=4 * row + (4 - summed) * col)
        norm = {"norm": Counter(all_reduce=norms)} if norms * col else {}
        assert backward.count == {"product": +product, **norm}


# --------------------------------------------------------------------------- as choices says


def predicted(choices: Choices, first: bool = True) -> tuple[Traffic, Traffic]:
    """What a layer's products are said to send, forward and backward."""
    nothing = Traffic(0, 0, 0)
    layer = [choices[name] for name in LAYER]
    forward = sum((choices.forward(choice, first) for choice in layer), nothing)
    return forward, sum((choices.backward(choice) for choice in layer), nothing)


def agrees(counted: Volume, said: Traffic) -> None:
    """Elements along rows and down columns, and messages, of volumes of products alone."""
    for axis, moved in (("col", said.col), ("row", said.row)):
        assert math.isclose(counted.by_axis.get(axis, 0), moved, rel_tol=1e-9), axis
    assert counted.by_axis.keys() <= {"col", "row"}
    assert sum(counted.count.get("product", Counter()).values()) == said.messages


SAID: list[dict[str, Any]] = [
    *(
        {"scheme": "megatron", "cols": 4, "sequence_parallel": sequence, "keep_gathered": keep}
        for sequence in (False, True)
        for keep in ("none", "inputs", "weights", "all")
    ),
    *(
        optimus(grid, stationary=stationary, keep_gathered=keep)
        for grid in GRIDS
        for stationary in ("auto", "output", "input")
        for keep in ("none", "inputs", "weights", "all")
    ),
    *(
        optimus(grid, stationary=stationary, schedule=schedule)
        for grid in GRIDS
        for stationary in ("auto", "output", "input")
        for schedule in ("broadcast", "pipelined")
    ),
]


def short(layout: dict[str, Any]) -> str:
    return "-".join(str(value) for name, value in layout.items() if name != "scheme")


def layers(layouts: list[dict[str, Any]]) -> list[tuple[Volume, Volume]]:
    return [one_layer(layout, "product") for layout in layouts]


@pytest.mark.parametrize("n", sorted({LayoutConfig(**layout).n_processes for layout in SAID}))
def test_a_layer_is_as_choices_says(pool: WorkerPool, n: int) -> None:
    """Volumes and messages of one micro-batch, for everything that can be chosen."""
    layouts = [layout for layout in SAID if LayoutConfig(**layout).n_processes == n]
    for volumes in pool.run(n, layers, layouts):
        for layout, (forward, backward) in zip(layouts, volumes):
            choices = decide(CONFIG, LayoutConfig(**layout), Work(tokens=B * S))
            said = predicted(choices)
            try:
                agrees(forward, said[0])
                agrees(backward, said[1])
            except AssertionError as error:
                raise AssertionError(f"{short(layout)}: {error}") from error


# --------------------------------------------------------------------------- head and embedding


def both_ends(layout: dict[str, Any]) -> tuple[Volume, Volume]:
    """Products of the embedding and of the head."""
    whole, layer = passes(LayoutConfig(**layout), 1), one_layer(layout, "product")
    forward, backward = (volume_of(a, "product").minus(b) for a, b in zip(whole, layer))
    return forward, backward


@pytest.mark.parametrize("schedule", ["broadcast", "gather"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_logits_never_travel(pool: WorkerPool, grid: tuple[int, int], schedule: str) -> None:
    """Where the narrower activation travels: bsh for the embedding's result, bsh for the head's
    input, and their gradients; with the paper's placement bsv for the logits."""
    rows, cols = grid
    padded = -(-V // math.lcm(rows, cols)) * math.lcm(rows, cols)
    unit = Fraction(cols - 1, rows * cols) * B * S
    table = Fraction(rows - 1, rows * cols) * padded * H
    for forward, backward in pool.run(rows * cols, both_ends, optimus(grid, schedule=schedule)):
        assert forward.by_axis == along(grid, (H + H) * unit, 2 * table)
        assert backward.by_axis == along(grid, (H + 2 * H) * unit, 3 * table)
    layout = optimus(grid, schedule=schedule, stationary="input")
    again = 1 if schedule == "gather" else 2
    for forward, backward in pool.run(rows * cols, both_ends, layout):
        assert forward.by_axis == along(grid, padded * unit, 2 * table)
        assert backward.by_axis == along(grid, again * padded * unit, 3 * table)


@pytest.mark.parametrize(("cols", "sequence"), MEGATRON)
def test_ends_of_megatron(pool: WorkerPool, cols: int, sequence: bool) -> None:
    """The embedding's result is summed, the head's gradient too; never anything of width v."""
    layout = {"scheme": "megatron", "cols": cols, "sequence_parallel": sequence}
    unit = Fraction(cols - 1, cols) * BSH
    again = 1 if sequence else 0
    for forward, backward in pool.run(cols, both_ends, {**layout, "keep_gathered": "none"}):
        assert forward.by_axis == {"col": 2 * unit}
        assert backward.by_axis == {"col": (2 + again) * unit}


@pytest.mark.parametrize(
    "layout",
    [
        {"scheme": "megatron", "cols": 2},
        {"scheme": "megatron", "cols": 4, "sequence_parallel": True},
        {"scheme": "optimus", "rows": 1, "cols": 4},
        {"scheme": "optimus", "rows": 2, "cols": 3},
        {"scheme": "optimus", "rows": 2, "cols": 3, "schedule": "broadcast", "stationary": "input"},
        {"scheme": "optimus", "rows": 4, "cols": 1},
    ],
    ids=short,
)
def test_loss_moves_three_numbers_a_token(pool: WorkerPool, layout: dict[str, Any]) -> None:
    """Never the logits: three all-reduces of b*s numbers forward, nothing backward."""
    rows, cols = layout.get("rows", 1), layout["cols"]
    tokens = Fraction(B * S, rows)
    for forward, backward in pool.run(rows * cols, loss_traffic, layout):
        if cols > 1:
            assert forward.count["loss"] == Counter(all_reduce=3)
            assert forward.moved["loss"] == 3 * Fraction(2 * (cols - 1), cols) * tokens
        else:
            assert "loss" not in forward.count
        assert "loss" not in backward.count


def loss_traffic(layout: dict[str, Any]) -> tuple[Volume, Volume]:
    forward, backward = passes(LayoutConfig(**layout), 1)
    return volume_of(forward, "loss"), volume_of(backward, "loss")


# --------------------------------------------------------------------------- one step


@dataclass
class StepTraffic:
    """Of one rank and one optimizer step; and the sizes of what it holds.

    copied: by axis, this rank's index and the elements it holds copies of.
    """

    products: Volume
    volume: Volume
    by_axis_and_label: dict[tuple[str, str], Volume]
    copied: dict[str, tuple[int, int]]
    owned_sizes: list[int]
    owned_late: list[bool]  # copies' owners add up their copies' gradients first


def one_step(
    layout: dict[str, Any], micro_batches: int, bucket_bytes: int, vocab_size: int = V
) -> StepTraffic:
    torch.set_num_threads(1)
    plan = LayoutConfig(**layout)
    axes, config = axes_of(plan), tiny(vocab_size=vocab_size)
    model = build_parallel(config, plan, axes, 1, CPU)
    settings = TrainConfig(global_batch=B, micro_batches=micro_batches)
    batch = batch_of(0, config, B)

    def read(rows: slice) -> Tensor:
        return batch[rows]

    with patch.object(reductions, "_BUCKET_BYTES", bucket_bytes), record() as recorder:
        stepper = Stepper(model, settings, axes)
        stepper(0, read)
    groups: dict[tuple[str, str], list[Any]] = {}
    for r in recorder.records:
        groups.setdefault((r.axis, r.label), []).append(r)
    return StepTraffic(
        volume_of(recorder, "product"),
        Volume.of(recorder),
        {key: Volume.of(Recorder(records)) for key, records in groups.items()},
        _copied(model, axes),
        [p.numel() for _, p in reductions.owned(model)],
        [shard_of(p).partial for _, p in reductions.owned(model)],
    )


def _copied(model: GPT2, axes: Axes) -> dict[str, tuple[int, int]]:
    copied: dict[str, tuple[int, int]] = {}
    for parameter in model.parameters():
        name = shard_of(parameter).copies
        if name:
            before = copied.get(name, (0, 0))[1]
            copied[name] = axes[name].index, before + parameter.numel()
    return copied


# A step of several micro-batches: all products, by the formulas of choices and the embedding's.
WHOLE_STEPS = [
    ({"scheme": "megatron", "cols": 2, "keep_gathered": "none"}, 1),
    ({"scheme": "megatron", "cols": 4, "sequence_parallel": True, "keep_gathered": "inputs"}, 3),
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
    """Of the embedding in one step; `Choices` speaks of the head, which reads the same table.

    Forward its result is summed, unless the table lies as the paper's does; backward the gradient
    is made whole. The table itself travels as for the head; a table that is kept comes once for
    both, which is the head's.
    """
    rows, cols, head = choices.rows, choices.cols, choices["head"]
    m, steps = choices.work.micro_batches, 1
    if head.schedule != "gather":
        steps = rows + cols - math.gcd(rows, cols)
    summed = (cols - 1) / (rows * cols) * choices.work.tokens * H
    table = (rows - 1) / (rows * cols) * vocab_size * H
    # How often each travels in one micro-batch.
    if choices.replicated:
        on_col, col_messages = 2, 1
    elif head.stays == "output":
        on_col, col_messages = 2, 2
    else:
        on_col, col_messages = 0, 0
    on_row = 1 if head.keep_weight else 2
    messages = col_messages * (cols > 1) + on_row * (rows > 1)
    return Traffic(m * on_col * summed, m * on_row * table, m * steps * messages)


@pytest.mark.parametrize(
    ("layout", "micro_batches"), WHOLE_STEPS, ids=lambda x: short(x) if isinstance(x, dict) else ""
)
def test_a_step_is_as_choices_says(
    pool: WorkerPool, layout: dict[str, Any], micro_batches: int
) -> None:
    """Several micro-batches, in which a weight that is kept travels once."""
    plan, vocab_size = LayoutConfig(**layout), 96  # divides by all grids
    work = Work(tokens=B // micro_batches * S, micro_batches=micro_batches)
    choices = decide(tiny(vocab_size=vocab_size), plan, work)
    said = embedding(choices, vocab_size)
    for choice in choices.products.values():
        said = said + choices.step(choice)
    for one in pool.run(plan.n_processes, one_step, layout, micro_batches, LARGE, vocab_size):
        agrees(one.products, said)


LARGE = 25 << 20
# Of one device: the axes over which it holds copies of vectors, with how many elements.
N = CONFIG.n_layers
NORMS = 2 * H * (2 * N + 1)  # weight and bias of each
BIASES = N * (3 * H + H + 4 * H + H)
POSITIONS = CONFIG.max_seq_len * H
CLOSING = 2 * N * H  # biases that are added where activations between sections are whole
STEPS: list[tuple[dict[str, Any], dict[str, int]]] = [
    ({"scheme": "megatron", "cols": 2}, {"col": NORMS + CLOSING + POSITIONS}),
    ({"scheme": "megatron", "cols": 2, "dp": 2}, {"col": NORMS + CLOSING + POSITIONS}),
    (
        {"scheme": "megatron", "cols": 4, "sequence_parallel": True},
        {"col": NORMS + CLOSING + POSITIONS},
    ),
    (optimus((2, 2)), {"row": (BIASES + POSITIONS) // 2, "grid": NORMS}),
    (optimus((2, 2), stationary="input"), {"row": (BIASES + POSITIONS + NORMS) // 2}),
    (optimus((2, 2), schedule="pipelined"), {"row": (BIASES + POSITIONS + NORMS) // 2}),
    (optimus((1, 4)), {"grid": NORMS}),
    (optimus((4, 1)), {"row": BIASES + POSITIONS, "grid": NORMS}),
    ({**optimus((2, 2)), "dp": 2}, {"row": (BIASES + POSITIONS) // 2, "grid": NORMS}),
    ({"scheme": "single", "dp": 2}, {}),
]


@pytest.mark.parametrize(
    ("layout", "copies"), STEPS, ids=lambda x: short(x) if "scheme" in x else ""
)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_one_message_a_step_and_purpose(
    pool: WorkerPool, layout: dict[str, Any], copies: dict[str, int], micro_batches: int
) -> None:
    """Copies' gradients and values travel in one message a step and axis that has copies, not in
    one a layer or micro-batch."""
    rows, cols, dp = (layout.get(name, 1) for name in ("rows", "cols", "dp"))
    partial = layout["scheme"] == "optimus" or "sequence_parallel" in layout
    traffic = pool.run(rows * cols * dp, one_step, layout, micro_batches, LARGE)
    for rank, one in enumerate(traffic):
        places = {"row": rank // cols % rows, "col": rank % cols, "grid": rank % (rows * cols)}
        assert one.copied == {name: (places[name], n) for name, n in copies.items()}
        # Sums over dp start during backward, bucket by bucket; those of copies' owners after it.
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
            assert gradients.moved["gradients"] == Fraction(2 * (dp - 1), dp) * sum(one.owned_sizes)
        wanted = Counter(broadcast=len(copies))
        assert one.volume.count.get("copies", Counter()) == +wanted
        wanted = Counter(reduce=len(copies) * partial, all_reduce=len(over_dp))
        assert one.volume.count.get("gradients", Counter()) == +wanted
        assert one.volume.count["metrics"] == Counter(all_reduce=2)


def buckets_of(sizes: list[int], limit: int) -> list[int]:
    """Bytes of the buckets of float32 gradients: filled from the model's end until the next tensor
    would exceed the limit, or a quarter of all."""
    limit = min(limit, 4 * sum(sizes) // 4)
    buckets: list[int] = []
    for size in reversed(sizes):
        if buckets and buckets[-1] + 4 * size <= limit:
            buckets[-1] += 4 * size
        else:
            buckets.append(4 * size)
    return buckets


def test_gradients_travel_in_buckets(pool: WorkerPool) -> None:
    """A large tensor is a bucket by itself, small ones share one."""
    limit = 20_000  # bytes; the largest matrices are larger, the vectors are far smaller
    for one in pool.run(2, one_step, {"scheme": "single", "dp": 2}, 1, limit):
        buckets = buckets_of(one.owned_sizes, limit)
        assert max(buckets) > limit
        assert len(buckets) > 3
        assert one.volume.count["gradients"] == Counter(all_reduce=len(buckets))
        assert one.volume.moved["gradients"] == sum(one.owned_sizes)
