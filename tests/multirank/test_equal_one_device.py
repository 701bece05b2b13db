"""Layouts, schedules and methods that the exactness matrix lacks train exactly as one device.

Each case compares loss, norm, every gradient and the parameters after AdamW steps with clipping.
Initial weights must not depend on the layout either. In float64 they agree to 1e-9.
"""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from gridformer.config import LayoutConfig, Task
from gridformer.config.reading import configs_dir
from gridformer.exactness import IN_BACKWARD, METHODS
from gridformer.parallel.auto.heuristics import decide
from tests.support.marks import full_unless
from tests.support.multirank import exactness
from tests.support.multirank.layouts import GRIDS, KINDS, Layout, n_of, subgraph
from tests.support.multirank.matrix import CELLS, EXPERTS, QUICK, SCHEMES, SETTINGS, Cell, refusal
from tests.support.multirank.matrix import MODELS as MATRIX_MODELS
from tests.support.multirank.matrix import n_of as n_of_cell
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.replicas import FIRST, MODEL, OPTIMUS, SEQUENCE, SINGLE, SUPER, THREE

Settings = dict[str, Any]


class Case(NamedTuple):
    """A layout, changes of the tiny model and of the training, and whether `make test` runs it."""

    name: str
    layout: Layout
    model: Settings
    train: Settings
    quick: bool
    task: Task = "auto"

    def __str__(self) -> str:
        more = {k: v for k, v in self.train.items() if k not in exactness.TRAIN and k != "dtype"}
        words = [self.name, *self.layout.values(), *more.values()]
        return "-".join(map(str, words)).replace(", ", "_").replace(" ", "_")


def cases(
    name: str, layouts: list[Layout], quick: list[Layout], model: Mapping[str, Any], **train: Any
) -> list[Case]:
    settings = {"dtype": "float64", **train}
    return [Case(name, one, dict(model), settings, one in quick) for one in layouts]


# --------------------------------------------------- grids

MEGATRON: Layout = {"scheme": "megatron", "cols": 2}
LINE: Layout = {"scheme": "megatron", "cols": 4, "sequence_parallel": True}
WEIGHTS_TOO: Layout = {"scheme": "megatron_2d", "rows": 2, "cols": 2}
SQUARE: Layout = {"scheme": "optimus", "rows": 2, "cols": 2}
TWO_BY_THREE: Layout = {"scheme": "optimus", "rows": 2, "cols": 3}
KEPT_CHOICES = ("none", "inputs", "weights", "all")
ALONE = [{**grid, "dp": 1} for grid in GRIDS]
LAYOUTS = [*ALONE, *({**grid, "dp": 2} for grid in GRIDS if n_of(grid) <= 6)]
PRODUCTS = [
    {**grid, "schedule": schedule, "stationary": one, "micro_batches": 2}
    for grid in GRIDS
    for schedule in ("broadcast", "pipelined", "gather")
    for one in ("auto", "output", "input")
    if grid["scheme"] == "optimus"
]
ACCUMULATED = [
    {**layout, "micro_batches": 3}
    for layout in ({**MEGATRON, "dp": 2}, LINE, {**SQUARE, "dp": 2}, TWO_BY_THREE)
]
KEPT = [
    {**grid, "schedule": "gather", "stationary": one, "keep_gathered": keep, "micro_batches": 3}
    for grid in (SQUARE, TWO_BY_THREE)
    for one in ("auto", "output")
    for keep in KEPT_CHOICES
]
KEPT += [{**LINE, "keep_gathered": keep, "micro_batches": 3} for keep in KEPT_CHOICES[:2]]
KEPT += [{**WEIGHTS_TOO, "keep_gathered": keep, "micro_batches": 3} for keep in KEPT_CHOICES]
SOME_PRODUCTS = [
    {**SQUARE, "schedule": "broadcast", "stationary": "input"},
    {**SQUARE, "schedule": "pipelined", "stationary": "auto", "dp": 2},
    {**SQUARE, "schedule": "gather", "keep_gathered": "none"},
    {**TWO_BY_THREE, "schedule": "pipelined", "stationary": "output"},
    {**TWO_BY_THREE, "schedule": "gather", "stationary": "input", "keep_gathered": "all"},
]
NARROW = [MEGATRON, LINE, WEIGHTS_TOO, SQUARE, TWO_BY_THREE]
FOUR_COLUMNS = [
    {"scheme": "megatron", "cols": 4},
    LINE,
    {"scheme": "megatron_2d", "rows": 2, "cols": 4},
]
# A model's width need not divide over columns if heads have a width of their own.
OWN_HEADS = {"hidden_size": 10, "n_heads": 4, "head_dim": 3, "n_layers": 1, "max_seq_len": 12}


def on_three_columns(layout: Layout) -> bool:
    """Accept 2x3 layouts with one stationary choice per schedule, all of them different."""
    each = (("broadcast", "input"), ("pipelined", "output"), ("gather", "auto"))
    one = (layout["schedule"], layout["stationary"]) in each
    return (layout["rows"], layout["cols"]) == (2, 3) and one


def kept_quickly(layout: Layout) -> bool:
    """With `output` some products have other operands than with `auto`; the same are kept."""
    if layout["cols"] == 4:
        return True
    also = (("output", "all"), ("auto", "none"))
    return layout["cols"] == 3 and (layout["stationary"], layout["keep_gathered"]) in also


def grids() -> Iterator[Case]:
    yield from cases("grid", LAYOUTS, [one for one in ALONE if n_of(one) == 6], {})
    two = [one for one in ALONE if n_of(one) == 2]
    yield from cases("float32", LAYOUTS, two, {}, dtype="float32")
    # Using one mask twice on a grid would differ from one device's masks.
    dropped = [{**one, "dp": 1} for one in (TWO_BY_THREE, LINE)]
    masks = {"dropout": 0.2, "attention_dropout": 0.1}
    yield from cases("dropout", ALONE, dropped, masks)
    yield from cases("accumulated", ACCUMULATED, [], {"dropout": 0.1})  # quickly in `kept`
    quick = [one for one in PRODUCTS if on_three_columns(one)]
    yield from cases("products", PRODUCTS, quick, exactness.EVERYTHING)
    # A weight that was kept into the next step would show in the next step's loss.
    quick = [one for one in KEPT if kept_quickly(one)]
    yield from cases("kept", KEPT, quick, exactness.EVERYTHING, global_batch=36)
    short = {"max_seq_len": 12}
    yield from cases(
        "products in float32", SOME_PRODUCTS, SOME_PRODUCTS[4:], short, dtype="float32"
    )
    for size in (24, 48):  # then another activation than usual is the narrower one
        model = {"ffn_size": size, "vocab_size": 13, "n_layers": 1, "max_seq_len": 12}
        yield from cases(f"ffn {size}", NARROW, [TWO_BY_THREE], model)
    yield from cases("own heads", FOUR_COLUMNS, FOUR_COLUMNS[:2], OWN_HEADS)


# --------------------------------------------------- families

MODELS: dict[str, Settings] = {
    "bert": {"family": "bert"},
    "bert-pre": {"family": "bert", "norm_position": "pre", "n_labels": 3},
    "t5": {"family": "t5", "relative_buckets": 8, "relative_max_distance": 16},
    "t5-wide": {"family": "t5", "head_dim": 8, "n_decoder_layers": 1},
    "transformer": {"family": "transformer", "label_smoothing": 0.1},
    "transformer-pre": {"family": "transformer", "norm_position": "pre", "n_decoder_layers": 1},
    "gpt2": {"family": "gpt2", "n_labels": 3},
    "llama-smoothed": {"family": "llama", "label_smoothing": 0.1},
}
BRANCHES: Layout = {"scheme": "subgraph", "branches": 2}
OUTSIDE: Layout = {"attention": "outside", "feed_forward": "common"}
FAMILY_LAYOUTS: dict[str, Layout] = {
    "data": {"scheme": "single", "dp": 2},
    "line": MEGATRON,
    "sequence": {**MEGATRON, "cols": 3, "sequence_parallel": True},
    "square": SQUARE,
    "panels": {**SQUARE, "schedule": "pipelined", "stationary": "input"},
    "kept": {**TWO_BY_THREE, "schedule": "gather", "keep_gathered": "all"},
    "branches": {**BRANCHES, "dp": 2},
    "outside": {**BRANCHES, **OUTSIDE},
    "first": {**BRANCHES, "common": "first"},
    "first, outside": {
        **{**BRANCHES, "branches": 3, "common": "first", "micro_batches": 2},
        **OUTSIDE,
    },
}
QUICK_FAMILIES = {
    *(("bert-pre", "square"), ("t5-wide", "first, outside")),
    *(("bert", "panels"), ("bert", "sequence"), ("transformer", "outside")),
    *(("llama-smoothed", "sequence"), ("gpt2", "kept")),
}
# Settings vary as much as layouts: each value meets most of the others' values at least once.
SUBGRAPHS: list[Layout] = [
    *(subgraph(2, **kind, micro_batches=2) for kind in KINDS),
    subgraph(3, **KINDS[2], keep_gathered="inputs", micro_batches=2),
    subgraph(3, **KINDS[4], keep_gathered="none"),
    *(subgraph(2, 2, **kind, order="contiguous") for kind in KINDS),
    subgraph(2, 2, **KINDS[0], keep_gathered="inputs", micro_batches=3),
    subgraph(2, 2, **KINDS[4], keep_gathered="inputs", micro_batches=3),
    subgraph(2, 2, **KINDS[6], micro_batches=2),
    subgraph(4, **KINDS[0], keep_gathered="none", micro_batches=3),
    subgraph(4, **KINDS[5], keep_gathered="inputs", micro_batches=2),
    subgraph(4, **KINDS[7], micro_batches=3),
    subgraph(3, 2, **KINDS[3], order="contiguous"),
    subgraph(3, 2, **KINDS[6], keep_gathered="none", micro_batches=2),
    subgraph(4, 2, **KINDS[2], keep_gathered="inputs", micro_batches=3),
    subgraph(4, 2, **KINDS[4], order="contiguous", keep_gathered="none"),
]


def families() -> Iterator[Case]:
    for (model, changes), (name, layout) in itertools.product(
        MODELS.items(), FAMILY_LAYOUTS.items()
    ):
        config = {"dropout": 0.1, "attention_dropout": 0.1, "max_seq_len": 12, **changes}
        quick = (model, name) in QUICK_FAMILIES
        yield Case(f"{model}-{name}", layout, config, {"dtype": "float64"}, quick)
    yield from cases("branches", SUBGRAPHS, SUBGRAPHS[::8], {**exactness.EVERYTHING})
    rounded = [subgraph(2, **KINDS[6]), subgraph(2, 2, **KINDS[0]), subgraph(4, **KINDS[4])]
    yield from cases("branches", rounded, rounded, {"max_seq_len": 12}, dtype="float32")
    # Each column sums biases of BERT's head for its own tokens, or has masks of all samples.
    stationary: list[Layout] = [{**SQUARE, "stationary": "weight"}]
    stationary.append({**stationary[0], "sequence_parallel": True})
    masks = {"family": "bert", "dropout": 0.1, "attention_dropout": 0.1, "max_seq_len": 12}
    yield from cases("stationary", stationary, stationary, masks)
    labels = [subgraph(2, 2, common=common) for common in ("all", "first")]
    yield from cases("labels", labels, labels, {**exactness.EVERYTHING, "n_labels": 3})


# --------------------------------------------------- replicas

NOT_KEPT: Layout = {**OPTIMUS, "schedule": "gather", "keep_gathered": "none"}
REPLICATED: list[Layout] = [
    SINGLE,
    THREE,
    {**MEGATRON, "dp": 2},
    SEQUENCE,
    {**WEIGHTS_TOO, "dp": 2},
    SUPER,
    {**SUPER, "dp": 1},  # common layers have replicas, branches have none
    {**SUPER, **OUTSIDE},
    FIRST,
    {**FIRST, **OUTSIDE},  # processes of the second sub-grid hold nothing
    OPTIMUS,
    NOT_KEPT,
    {**OPTIMUS, "schedule": "gather", "keep_gathered": "all", "stationary": "input"},
    {**OPTIMUS, "schedule": "pipelined"},
    {**OPTIMUS, "schedule": "broadcast", "stationary": "output"},
]
SHARDED: list[Layout] = [
    {**scheme, **mode, "micro_batches": micro_batches}
    for scheme in REPLICATED
    for mode in (
        {"dp_mode": "zero1"},
        {"dp_mode": "fsdp"},
        {"dp_mode": "fsdp", "reshard": "step"},  # gathered parameters stay until the step ends
    )
    for micro_batches in (1, 3)
]
EACH_PASS: Layout = {"gradient_sync": "micro_batch", "micro_batches": 3}
SHARDED += [
    {**scheme, "dp_mode": mode, **EACH_PASS} for scheme in REPLICATED for mode in ("zero1", "fsdp")
]
SHARDED_FAMILIES: dict[str, Settings] = {
    "bert": {"family": "bert", "n_labels": 3},
    "t5": {"family": "t5", "n_decoder_layers": 1, "relative_buckets": 8},
    "transformer": {"family": "transformer", "norm_position": "pre"},
}
# Four replicas of which two neighbors shard, and branches, of whose common layers there are four.
HYBRID: list[Layout] = [
    {**scheme, **mode, "shard_over": 2}
    for scheme in (
        {"dp": 4},
        SUPER,
        {**SUPER, "dp": 4},
        {**FIRST, "dp": 4},
        {**SEQUENCE, "dp": 4},
        {**WEIGHTS_TOO, "cols": 1, "dp": 4},
        {**OPTIMUS, "cols": 1, "dp": 4},
        {"dp": 4, "pp": 2, "stages_per_rank": 2},
    )
    for mode in (
        {"dp_mode": "zero1", "micro_batches": 2},
        {"dp_mode": "zero1", "gradient_sync": "micro_batch", "micro_batches": 2},
        {"dp_mode": "fsdp", "micro_batches": 2},
        {"dp_mode": "fsdp", "reshard": "step", "gradient_sync": "micro_batch", "micro_batches": 6},
    )
]
QUICK_HYBRID = [HYBRID[2], HYBRID[5], HYBRID[-1]]
QUICK_SHARDED: list[Layout] = [
    {**THREE, "dp_mode": "zero1", "micro_batches": 1},
    {**SUPER, "dp_mode": "zero1", "micro_batches": 1},
    {**THREE, "dp_mode": "fsdp", "micro_batches": 3},
    {**FIRST, "dp_mode": "fsdp", "micro_batches": 3},
    {**SEQUENCE, "dp_mode": "fsdp", "reshard": "step", "micro_batches": 3},
    {**THREE, "dp_mode": "fsdp", **EACH_PASS},
    {**NOT_KEPT, "dp_mode": "zero1", **EACH_PASS},
]


def replicas() -> Iterator[Case]:
    yield from cases("sharded", SHARDED, QUICK_SHARDED, MODEL, global_batch=36)
    model = {**MODEL, "n_layers": 4}
    yield from cases("hybrid", HYBRID, QUICK_HYBRID, model, global_batch=48)
    for family, below, mode in itertools.product(
        SHARDED_FAMILIES, (SINGLE, OPTIMUS, FIRST, SEQUENCE), ("zero1", "fsdp")
    ):  # two stacks, score biases, several losses, and heads with their own parameters
        layouts = [{**below, "dp_mode": mode, "micro_batches": 3}]
        quick = layouts if below is SINGLE and mode == "fsdp" else []
        model = {**MODEL, **SHARDED_FAMILIES[family]}
        yield from cases(family, layouts, quick, model, global_batch=36)


# --------------------------------------------------- pipelines


def pipe(pp: int, m: int, k: int = 1, **layout: Any) -> Layout:
    return {"pp": pp, "micro_batches": m, "stages_per_rank": k, **layout}


SMALL: Settings = {"hidden_size": 16, "n_heads": 4, "vocab_size": 29, "max_seq_len": 8}
SMALL |= {"dropout": 0.1, "attention_dropout": 0.1}
STACKS = {"n_layers": 3, "n_decoder_layers": 5}  # which no number of stages divides
PIPED_MODELS: dict[str, Settings] = {
    "gpt2": {**SMALL, "n_layers": 4, "n_labels": 3},
    "bert": {**SMALL, "family": "bert", "n_layers": 4, "n_labels": 3},
    "t5": {**SMALL, "family": "t5", **STACKS, "relative_buckets": 8, "relative_max_distance": 8},
    "transformer": {**SMALL, "family": "transformer", **STACKS, "label_smoothing": 0.1},
}
SHORT_LINE: Layout = {**MEGATRON, "sequence_parallel": True}
# Orders other than 1F1B with pp micro-batches.
QUICK_PIPED: list[tuple[Layout, str]] = [
    (pipe(2, 4, 2), "t5"),
    (pipe(2, 3, pipeline="gpipe"), "transformer"),
    (pipe(2, 1, **MEGATRON), "bert"),
    (pipe(2, 4, 2, **SHORT_LINE), "gpt2"),
    (pipe(2, 4, 2, dp=2, dp_mode="fsdp", gradient_sync="micro_batch"), "t5"),
    (pipe(2, 4, 2, scheme="optimus", rows=2, schedule="gather"), "gpt2"),
    (pipe(2, 3, **BRANCHES, common="first"), "bert"),
]
PIPED_SCHEMES: list[Layout] = [
    *({}, {"dp": 2}, MEGATRON, {**MEGATRON, "dp": 2}),
    *(SHORT_LINE, WEIGHTS_TOO, SQUARE, FAMILY_LAYOUTS["panels"]),
    {**SQUARE, "schedule": "gather", "keep_gathered": "all"},
    *(BRANCHES, {**BRANCHES, **OUTSIDE}, {**BRANCHES, "dp": 2}, {**BRANCHES, "common": "first"}),
    {**BRANCHES, **OUTSIDE, "common": "first"},
    {**BRANCHES, "common": "first", "dp": 2, "order": "contiguous"},
]
ORDERS: list[Layout] = [
    *(pipe(2, 1), pipe(2, 2), pipe(2, 6), pipe(2, 4, pipeline="gpipe"), pipe(2, 6, 2)),
    *(pipe(2, 1, 3), pipe(3, 3, 2), pipe(4, 3), pipe(4, 6), pipe(4, 2, 2)),
]


def pipelines() -> Iterator[Case]:
    """Yield every scheme with every order, and each with every family, on up to 16 ranks."""
    piped = [*QUICK_PIPED]
    for (i, scheme), (j, order) in itertools.product(enumerate(PIPED_SCHEMES), enumerate(ORDERS)):
        name = [*PIPED_MODELS][(i + j) % 4]
        plan = LayoutConfig(**order, **scheme)
        fits = plan.n_stages <= (11 if name in ("t5", "transformer") else 6)
        parts = plan.micro_batches * plan.dp * plan.rows * plan.branches
        if fits and 24 % parts == 0 and plan.n_processes <= 16:
            piped.append(({**order, **scheme}, name))
    for layout, name in piped:
        quick = (layout, name) in QUICK_PIPED
        yield Case(f"piped {name}", layout, PIPED_MODELS[name], {"dtype": "float64"}, quick)


ZERO_BUBBLE: Layout = {"pipeline": "zb_h1"}
V_SHAPED: Layout = {"pipeline": "zbv", "stages_per_rank": 2}
# One of each scheme, with every mode of replicas, models of each kind, and four stages.
QUICK_ZERO_BUBBLE = {
    Cell("GPT-2", "single", 4, "none", True),
    Cell("T5", "single", 2, "zero1", False),
    Cell("Experts", "Megatron", 2, "none", False),
    Cell("Llama", "Megatron, sequence parallel", 2, "fsdp", False),
    Cell("BERT", "Megatron 2-D", 2, "none", False),
    Cell("GPT-2", "Optimus", 2, "none", True),
    Cell("GPT-2", "D&SP", 2, "replicate", False),
    Cell("Transformer", "D&SP-cSub", 2, "none", True),
    Cell("Llama", "Optimus, stationary weights", 2, "none", True),
    Cell("DeepSeek experts", "Optimus, rows over s", 2, "none", False),
}
SYNC: Layout = {"dp": 2, "dp_mode": "fsdp", "gradient_sync": "micro_batch"}


def zero_bubble() -> Iterator[Case]:
    """Yield the pipelines of the exactness matrix, and methods, with late gradients of weights."""
    for cell in POSSIBLE:
        quick = cell in QUICK_ZERO_BUBBLE
        if quick or (cell.pp > 1 and cell.dropout and n_of_cell(cell) <= 4):
            layout = {**cell.layout, **ZERO_BUBBLE, "micro_batches": 2 * cell.pp}
            yield Case(f"split {cell.title}", layout, cell.config, SETTINGS, quick, cell.task)
            layout, deep = {**layout, **V_SHAPED}, {**cell.config, "n_layers": 2 * cell.pp - 1}
            yield Case(f"V {cell.title}", layout, deep, SETTINGS, quick, cell.task)
    sizes = {"n_layers": 3, "max_seq_len": 12, "dropout": 0.1, "attention_dropout": 0.1}
    for method in ("full", "selective", "some layers", "clip_by_layer", "offload"):
        for kind in ({}, SHORT_LINE, {**SQUARE, "keep_gathered": "none"}):
            quick = (method, kind) in (("full", SHORT_LINE), ("some layers", {}))
            train = {**SETTINGS, **METHODS[method]}
            yield Case(f"split {method}", pipe(2, 4, **ZERO_BUBBLE, **kind), sizes, train, quick)
            yield Case(f"V {method}", pipe(2, 4, **V_SHAPED, **kind), sizes, train, quick)
    more = [pipe(2, 4, **ZERO_BUBBLE, **SYNC), pipe(4, 6, **ZERO_BUBBLE, **SYNC)]
    more += [pipe(2, 4, **ZERO_BUBBLE, **{**SYNC, **over}) for over in ({"reshard": "step"},)]
    more += [pipe(2, 2, **V_SHAPED, **SYNC), pipe(3, 4, **V_SHAPED)]
    yield from cases("split", more, more[:1], sizes)


# --------------------------------------------------- methods

UPDATES = [*METHODS][3:]
POSSIBLE = [cell for cell in CELLS if n_of_cell(cell) <= 8 and not refusal(cell)]
# Of two equally useful cells, choose the one with dropout, whose masks must be made again.
TELLING = sorted(
    (cell for cell in POSSIBLE if n_of_cell(cell) <= 4 and cell.pp <= 2),
    key=lambda cell: (not cell.dropout, n_of_cell(cell), cell),
)
MODES = ("none", "replicate", "zero1", "none", "none", "none", "fsdp", "none")  # for each scheme
RECOMPUTED = {
    next(cell for cell in TELLING if (cell.model, cell.scheme, cell.replicas) == wanted)
    for wanted in zip(itertools.cycle(MATRIX_MODELS), SCHEMES, MODES)
} | {next(cell for cell in TELLING if cell.pp == 2)}
# One on each kind of grid, without dropout, so that attention is fused.
FUSED = [cell for cell in sorted(QUICK) if cell in POSSIBLE and not cell.dropout]
ATTENTION_KEPT = {*{cell.layout.get("scheme"): cell for cell in FUSED}.values()}
UPDATED = sorted(
    QUICK
    # a grid, and stages of which one has no layer
    | {Cell("GPT-2", "Optimus", 1, "none", True), Cell("GPT-2", "single", 4, "none", False)},
    key=lambda cell: (cell.model in EXPERTS, n_of_cell(cell), cell),
)
STRIP: Layout = {"scheme": "optimus", "rows": 2, "cols": 1}
SCHEDULED: dict[str, Layout] = {
    "broadcast": {**SQUARE, "schedule": "broadcast"},
    "pipelined": {**SQUARE, "schedule": "pipelined"},
    "pipelined, output": {**SQUARE, "schedule": "pipelined", "stationary": "output"},
    "none kept": {**SQUARE, "schedule": "gather", "keep_gathered": "none"},
    "all kept": {**SQUARE, "schedule": "gather", "keep_gathered": "all"},
    "inputs stay": {**SQUARE, "schedule": "gather", "stationary": "input"},
    "sequence, none kept": {**SHORT_LINE, "keep_gathered": "none"},
    "gpipe": pipe(2, 4, **MEGATRON, pipeline="gpipe"),
    "1f1b, kept weights": pipe(2, 4, **STRIP, keep_gathered="weights"),
    "interleaved": pipe(2, 4, 2),
    "interleaved, cut": pipe(2, 4, 2, **MEGATRON),
    "fsdp, grid": {**STRIP, "dp": 2, "dp_mode": "fsdp", "micro_batches": 2},
    "zero1, pipeline": pipe(2, 4, dp=2, dp_mode="zero1"),
    "outside": {**BRANCHES, "attention": "outside"},
    "common, first": {**BRANCHES, "common": "first", "feed_forward": "common"},
    "outside, first": {**BRANCHES, **OUTSIDE, "common": "first"},
}
QUICK_SCHEDULED = {("pipelined", "GPT-2"), ("interleaved", "GPT-2"), ("outside, first", "BERT")}


def of_cell(method: str, cell: Cell, quick: bool) -> Case:
    layout = cell.layout
    if method in UPDATES and cell.pp == 1 and cell.dropout:
        layout = {**layout, "micro_batches": 2}
    train = {**SETTINGS, **METHODS[method]}
    return Case(f"{method} {cell.title}", layout, cell.config, train, quick, cell.task)


def methods() -> Iterator[Case]:
    for cell in POSSIBLE:
        yield of_cell("full", cell, cell in RECOMPUTED)
        yield of_cell("some layers", cell, cell in ATTENTION_KEPT)
        if cell.dropout and n_of_cell(cell) <= 4:  # masks of probabilities, which no scheme changes
            quick = (cell.model, cell.scheme) == ("BERT", "Optimus")
            quick = quick and (cell.pp, cell.replicas) == (1, "none")
            yield of_cell("selective", cell, quick)
    for number, cell in enumerate(UPDATED):  # the small ones with one method each
        for method in UPDATES:
            turn = UPDATES[number % len(UPDATES)]
            quick = n_of_cell(cell) <= 2 and method == turn
            yield of_cell(method, cell, quick or (cell not in QUICK and method == "in_backward"))
    sizes = {"n_layers": 3, "max_seq_len": 12, "dropout": 0.1, "attention_dropout": 0.1}
    full = {**SETTINGS, **METHODS["full"]}
    for (name, layout), (model, changes) in itertools.product(
        SCHEDULED.items(), MATRIX_MODELS.items()
    ):
        quick = (name, model) in QUICK_SCHEDULED
        yield Case(f"full {name} {model}", layout, {**sizes, **changes}, full, quick)
    orders = [pipe(2, 4, pipeline="gpipe"), pipe(2, 4, pipeline="1f1b"), pipe(2, 4, 2)]
    both = orders + [{**order, "dp": 2, "dp_mode": "zero1"} for order in orders]
    # Each stage is updated in its own last backward pass.
    hybrid: Layout = {"dp": 4, "dp_mode": "fsdp", "shard_over": 2}
    each: Layout = {"gradient_sync": "micro_batch"}
    both += [hybrid, {**hybrid, **each, "micro_batches": 2}, {**orders[2], **hybrid, **each}]
    chosen = [*orders[:2], both[-2]]
    yield from cases("updated", both, chosen, sizes, global_batch=32, **IN_BACKWARD)


# With updates in the backward pass under D&SP-cSub, all sub-grids send in the same order. The first
# computes more than the others, which may hold no parameter of a layer at all. Norms of layers are
# all-reduced over both: if one side reached them earlier, each would wait for the other.
FULL = METHODS["full"]
POST = {"family": "transformer", "label_smoothing": 0.1}
ON_SUB_GRIDS: dict[str, tuple[Layout, Settings, Settings, bool]] = {
    "recomputed": ({"feed_forward": "common"}, FULL, {}, True),
    "norms after residuals": ({}, FULL, POST, False),
    "fsdp": ({"feed_forward": "common", "dp": 2, "dp_mode": "fsdp"}, FULL, {}, False),
    "no parameters": (OUTSIDE, {}, {}, False),
    "no parameters, pipeline": ({**OUTSIDE, "pp": 2, "micro_batches": 2}, {}, {}, True),
    "no parameters, replicas": ({**OUTSIDE, "dp": 2}, {}, {}, True),
    "no parameters, zero1": ({**OUTSIDE, "dp": 2, "dp_mode": "zero1"}, FULL, {}, False),
}


def sub_grids() -> Iterator[Case]:
    for name, (layout, train, model, quick) in ON_SUB_GRIDS.items():
        config = {"max_seq_len": 12, "dropout": 0.1, **model}
        settings = {**SETTINGS, **IN_BACKWARD, **train}
        yield Case(name, {**BRANCHES, "common": "first", **layout}, config, settings, quick)


# --------------------------------------------------- rows over the sequence


def over_sequence(scheme: str, rows: int, cols: int, **more: Any) -> Layout:
    return {"scheme": scheme, "rows": rows, "cols": cols, "rows_over": "sequence", **more}


ALONE_IN_STEP: Settings = {"micro_batches": 4}  # and with four sequences each is one
FOUR: Settings = {"global_batch": 4}
GROUPED: Settings = {"family": "llama", "n_kv_heads": 6, "qk_norm": True}
SELECTIVE: Settings = {"recompute": "selective"}
# On one row of three columns a column's part of the tokens lies in both chunks of the row.
ROWS: dict[str, tuple[Layout, Settings, Settings, bool]] = {
    "one sequence": (over_sequence("megatron_2d", 4, 1, **ALONE_IN_STEP), {}, FOUR, True),
    "one sequence, grid": (over_sequence("optimus", 2, 2, **ALONE_IN_STEP), GROUPED, FOUR, False),
    "both chunks": (over_sequence("megatron_2d", 2, 3), exactness.EVERYTHING, SELECTIVE, True),
    "recomputed": (over_sequence("optimus", 3, 1), GROUPED, {"recompute": "full"}, True),
    "kept attention": (over_sequence("megatron_2d", 2, 2), GROUPED,
        {"recompute": "except_attention"}, True),
    "recomputed scores": (over_sequence("optimus", 4, 1), GROUPED, SELECTIVE, False),
    "panels": (over_sequence("optimus", 3, 2, schedule="pipelined"),
        {**MODELS["t5"], "dropout": 0.1, "attention_dropout": 0.1},
        {"recompute": "full", "loss_chunk_tokens": 24}, False),
    "heads over rows": (over_sequence("optimus", 3, 2), {"dropout": 0.1, "attention_dropout": 0.1},
        {"recompute": "full"}, True),
    "heads over rows, source": (over_sequence("megatron_2d", 3, 2),
        {**MODELS["transformer"], "attention_dropout": 0.1}, SELECTIVE, False),
    "broadcasts": (over_sequence("optimus", 2, 2, schedule="broadcast"), {}, IN_BACKWARD, False),
    "windows": (over_sequence("megatron_2d", 3, 1, dp=2, dp_mode="fsdp"),
        {**GROUPED, "window": 7, "attention_dropout": 0.1}, {"recompute": "full"}, False),
    "interleaved": (over_sequence("optimus", 2, 1, **pipe(2, 4, 2)),
        {**PIPED_MODELS["transformer"], "norm_position": "pre"}, SELECTIVE, False),
    "float32": (over_sequence("megatron_2d", 2, 2), {}, {"dtype": "float32"}, False),
}  # fmt: skip


def rows_over_sequence() -> Iterator[Case]:
    for name, (layout, model, train, quick) in ROWS.items():
        yield Case(name, layout, model, {"dtype": "float64", **train}, quick)


CASES = sorted(
    [
        *(*grids(), *families(), *replicas(), *pipelines(), *methods(), *sub_grids()),
        *(*rows_over_sequence(), *zero_bubble()),
    ],
    key=lambda case: n_of(case.layout),  # process groups are rebuilt whenever their size changes
)


@pytest.mark.parametrize("case", full_unless(lambda case: case.quick, CASES), ids=str)
def test_equals_one_device(pool: WorkerPool, case: Case) -> None:
    settings = {**exactness.TRAIN, **case.train}
    exactness.assert_equal_one_device(pool, case.layout, case.model, settings, case.task)


ROUNDED: list[Case] = [
    *(Case("grid", one, {}, {}, one in (LINE, SQUARE)) for one in [*NARROW, *SOME_PRODUCTS]),
    Case("rows", over_sequence("megatron_2d", 2, 2), GROUPED, {"recompute": "full"}, False),
    *(
        Case("branches", subgraph(2, **kind), {"max_seq_len": 12}, {}, kind in KINDS[::5])
        for kind in KINDS
    ),
    *(
        Case(mode, {**SINGLE, "dp_mode": mode}, MODEL, {"global_batch": 36}, True)
        for mode in ("zero1", "fsdp")
    ),
    *(
        Case(f"piped {name}", pipe(2, 4, 2, **MEGATRON), model, {}, name == "gpt2")
        for name, model in PIPED_MODELS.items()
    ),
    Case("split", pipe(2, 4, **ZERO_BUBBLE, **MEGATRON), PIPED_MODELS["gpt2"], {}, True),
    Case("split fsdp", pipe(2, 4, **ZERO_BUBBLE, dp=2, dp_mode="fsdp"), MODEL, {}, False),
]


@pytest.mark.parametrize("case", full_unless(lambda case: case.quick, ROUNDED), ids=str)
def test_bfloat16_stays_close_to_one_device(pool: WorkerPool, case: Case) -> None:
    """Rounding to 8 bits happens in other places, so loss and norm are compared loosely."""
    settings = {**exactness.TRAIN, **case.train, "dtype": "bfloat16"}
    limit = 1e-2 if "pp" in case.layout else 2e-3
    for worst in pool.run(
        n_of(case.layout), exactness.compare, case.layout, case.model, settings, 2
    ):
        assert worst["initial"] == 0.0
        assert max(worst["loss"], worst["evaluated"]) < limit
        assert worst["norm"] < 10 * limit


def test_choices_on_slow_links_equal_one_device(pool: WorkerPool, tmp_path: Path) -> None:
    file = configs_dir() / "clusters" / "frontera-rtx5000.yaml"
    raw: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    del raw["host"]["link_gbps"]
    raw["host"] = {key: {"value": 0, "source": "a test"} for key in raw["host"]}
    for level in raw["levels"]:  # so slow that messages of tiny models are worth hiding
        level["bandwidth_gbps"]["value"], level["latency_us"]["value"] = 1e-3, 0
    path = tmp_path / "slow.yaml"
    path.write_text(yaml.safe_dump(raw), encoding="utf-8")
    layout = {**SQUARE, "cluster": str(path)}
    model = MATRIX_MODELS["T5"]
    choices = decide(exactness.tiny(**model), LayoutConfig(**layout))
    assert any(choice != choices.timed[name].by_rules for name, choice in choices.products.items())
    exactness.assert_equal_one_device(pool, layout, model, SETTINGS)
