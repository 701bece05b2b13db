"""Weights are cast once a step, and what a step computes does not depend on it."""

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gridformer.comm import record_messages
from gridformer.config import LayoutConfig, RunConfig, TrainConfig
from gridformer.memory.budget import nearest
from gridformer.memory.estimate import estimate_rank
from gridformer.mesh import Axes
from gridformer.models import Model
from gridformer.models.blocks import copy_of
from gridformer.models.blocks.cast import CastCopy
from gridformer.parallel import build_parallel
from gridformer.parallel.auto.decisions import decide_run
from gridformer.parallel.axes import build_axes
from gridformer.parallel.data.zero import replica_part
from gridformer.record.batch import rows_like
from gridformer.record.fake import watched_fakes
from gridformer.record.step import on_devices
from gridformer.train.step import Stepper
from gridformer.utils.batch import next_words
from tests.support.marks import full_unless
from tests.support.multirank.memory import a_run

CPU = torch.device("cpu")
Layout = dict[str, Any]
STEPS = 3


class Casts(TorchDispatchMode):
    """Counts how often the memory of each parameter is read into another type."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet is torch.ops.aten._to_copy:
            self._see(args[0], out)
        elif packet is torch.ops.aten.copy_:
            self._see(args[1], args[0])
        elif packet is torch.ops.aten._foreach_copy_:
            for made, source in zip(*args[:2], strict=True):
                self._see(source, made)
        return out

    def _see(self, source: Tensor, made: Tensor) -> None:
        if source.dtype != torch.float32 or made.dtype != torch.bfloat16:
            return
        for name, parameter in self.model.named_parameters():
            for held in (parameter, replica_part(parameter)):
                if held is not None and held.untyped_storage() is source.untyped_storage():
                    self.counts[name] = self.counts.get(name, 0) + 1
                    return


def casts_of(run: RunConfig, rank: int = 0) -> tuple[dict[str, int], set[str], float, float]:
    """Return what a step of one rank casts, how often, and the bytes of parameters it receives.

    Returns:
        The casts by parameter; the parameters that products read in another type; the bytes
        received over `dp`; the bytes that would be, if all parameters traveled in float32.
    """
    decisions = decide_run(run)
    layout, train = run.layout, run.train
    with on_devices(run, rank, backend="gloo") as log:
        axes = build_axes(layout, "cpu")
        with watched_fakes(log):
            model = build_parallel(
                run.model, layout, axes, 1, CPU, train.dtype, decisions.choices, filled=False
            )
            stepper = Stepper(model, train, axes, layout)
            with Casts(model) as casts, record_messages() as recorder:
                stepper(0, partial(rows_like, run))
            read = {name for name, p in model.named_parameters() if copy_of(p) is not None}
            inside = sum(p.numel() for name, p in model.named_parameters() if "layers." in name)
            outside = sum(p.numel() for p in model.parameters()) - inside
    times = 2 * layout.micro_batches
    whole = 4 * (layout.dp - 1) / layout.dp * (times * inside + outside)
    return casts.counts, read, recorder.bytes("parameters"), whole


BF16 = {"dtype": "bfloat16", "global_batch": 24}
OPTIMUS = {"scheme": "optimus", "rows": 2, "cols": 2}
LAYOUTS: dict[str, Layout] = {
    "single": {},
    "megatron": {"scheme": "megatron", "cols": 2},
    "optimus": OPTIMUS,
    "optimus, weights kept": {**OPTIMUS, "schedule": "gather", "keep_gathered": "weights"},
    "optimus, panels": {**OPTIMUS, "schedule": "pipelined"},
    "optimus, input stays": {**OPTIMUS, "schedule": "gather", "stationary": "input"},
    "D&SP": {"scheme": "subgraph", "branches": 2},
    "zero1": {"dp": 2, "dp_mode": "zero1"},
    "fsdp": {"dp": 2, "dp_mode": "fsdp"},
    "fsdp of grids": {**OPTIMUS, "dp": 2, "dp_mode": "fsdp"},
}
METHODS: dict[str, dict[str, Any]] = {
    "plain": {"loss_chunk_tokens": 0},
    "recomputed": {"recompute": "full", "loss_chunk_tokens": 32},
    "in backward": {"update": "in_backward", "clip_by": "layer", "loss_chunk_tokens": 32},
}


def quick(case: tuple[str, str]) -> bool:
    return case[1] == "recomputed" and case[0] in ("single", "optimus", "fsdp")


@pytest.mark.parametrize(
    "case", full_unless(quick, [(n, m) for n in LAYOUTS for m in METHODS]), ids="-".join
)
def test_each_weight_is_cast_once_a_step(case: tuple[str, str]) -> None:
    """That holds for any number of micro-batches, for recomputation and for a loss in chunks."""
    layout, method = LAYOUTS[case[0]], METHODS[case[1]]
    run = a_run({**layout, "micro_batches": 2}, {}, {**BF16, **method})
    counts, read, *_ = casts_of(run)
    assert {name: counts.get(name) for name in read} == dict.fromkeys(read, 1)
    assert counts.keys() == read


def test_without_copies_weights_are_cast_at_each_use() -> None:
    run = a_run({"micro_batches": 3}, {}, {**BF16, "cast": "use", "loss_chunk_tokens": 32})
    counts, read, *_ = casts_of(run)
    assert {counts[name] for name in read if name.endswith("mlp.up.weight")} == {6}
    assert counts["tokens.weight"] == 3, "the chunks of a micro-batch's loss share a copy"


@pytest.mark.parametrize("micro_batches", [pytest.param(1, marks=pytest.mark.full), 3])
def test_fsdp_gathers_layers_in_the_type_of_the_computation(micro_batches: int) -> None:
    """Norms are read in float32: they travel with the table, once."""
    layout = {"dp": 2, "dp_mode": "fsdp", "micro_batches": micro_batches}
    model = {"hidden_size": 48, "vocab_size": 96}
    *_, moved, whole = casts_of(a_run(layout, model, BF16))
    *_, wide, expected = casts_of(a_run(layout, model, {**BF16, "dtype": "float32"}))
    assert wide == expected == whole
    norms, outside = 2 * 2 * 2 * 48, 96 * 48 + 24 * 48 + 2 * 48
    inside = 2 * (12 * 48 * 48 + 13 * 48) - norms
    assert moved == 1 / 2 * (2 * micro_batches * inside * 2 + (outside + norms) * 4)


def trained(cast: str, layout: Layout, **train: Any) -> list[Tensor]:
    """Return the weights after some steps on one device."""
    run = a_run(layout, {"max_seq_len": 8, "dropout": 0.1}, {**BF16, **train, "cast": cast})
    choices = decide_run(run).choices
    model = build_parallel(run.model, run.layout, Axes(), 1, CPU, run.train.dtype, choices)
    settings = TrainConfig(**run.train.model_dump())
    stepper = Stepper(model, settings, Axes(), run.layout)
    rows = run.train.global_batch
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, run.model.vocab_size, (rows, 9), generator=generator)
        stepper(step, lambda part: next_words(tokens[part]))  # noqa: B023
        stepper.evaluate([lambda part: next_words(tokens[part])])  # noqa: B023
    return [parameter.detach().clone() for parameter in model.parameters()]


SAME: dict[str, tuple[Layout, dict[str, Any]]] = {
    "plain": ({}, {}),
    "chunks, recomputed": ({"micro_batches": 2}, {"loss_chunk_tokens": 8, "recompute": "full"}),
    "in backward": ({}, {"update": "in_backward", "clip_by": "layer"}),
    "offload": ({"micro_batches": 2}, {"offload": "optimizer", "recompute": "selective"}),
    "float16": ({}, {"dtype": "float16"}),
}


@pytest.mark.parametrize("case", full_unless(lambda name: name != "float16", SAME))
def test_weights_are_the_same_to_the_bit(case: str) -> None:
    """A copy that outlived an update would give other weights after the second step."""
    layout, train = SAME[case]
    once, each = (trained(cast, layout, **train) for cast in ("step", "use"))
    assert all(torch.equal(a, b) for a, b in zip(once, each, strict=True))


def test_a_stale_copy_would_be_seen() -> None:
    want = trained("use", {})
    with patch.object(CastCopy, "drop", lambda _: None):
        found = trained("step", {})
    assert not all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_no_copy_outlives_a_step() -> None:
    model = build_parallel(a_run({}, {}, {}).model, LayoutConfig(), Axes(), 1, CPU, "bfloat16")
    stepper = Stepper(model, TrainConfig(global_batch=2, dtype="bfloat16"), Axes())
    stepper(0, lambda rows: next_words(torch.zeros(2, 25, dtype=torch.long)[rows]))
    copies = [copy for p in model.parameters() if (copy := copy_of(p)) is not None]
    assert copies
    assert all(copy.value is None and not copy.held for copy in copies)


def test_estimates_contain_the_copies() -> None:
    """They are there at the peak of a step that accumulates gradients."""
    step, use = (
        estimate_rank(a_run({"micro_batches": 2}, {}, {**BF16, "cast": cast}), 0)
        for cast in ("step", "use")
    )
    h, v, n = 48, 128, 2  # the rows of the table are rounded up to 64
    copies = 2 * (n * (12 * h * h + 9 * h) + v * h)
    held = max(step.timeline.bytes_of["parameters"]) - max(use.timeline.bytes_of["parameters"])
    assert held == pytest.approx(copies, rel=0.01)
    assert step.between == use.between
    assert step.peak > use.peak


def test_memory_decides() -> None:
    def once(layout: Layout, **train: Any) -> bool:
        return decide_run(a_run(layout, {}, {**BF16, **train})).choices.cast_once

    assert once({})
    assert not once({}, cast="use")
    assert once({}, compile=True)
    # With few activations the copies would be more than a quarter of what a device holds.
    small = {"dp": 24, "dp_mode": "zero1"}
    long_model = {"max_seq_len": 1, "hidden_size": 480}
    choices = decide_run(a_run(small, long_model, BF16)).choices
    assert not choices.cast_once
    assert any(
        reason.startswith("cast: each weight is cast at each use") for reason in choices.reasons
    )
    assert decide_run(a_run(small, long_model, {**BF16, "cast": "step"})).choices.cast_once


def test_it_is_offered_where_memory_is_short() -> None:
    run = a_run({"micro_batches": 2}, {}, {**BF16, "loss_chunk_tokens": 32})
    worst = estimate_rank(run, 0)
    offers = nearest(run, worst, worst.peak - 1, at_most=1)
    assert [offer.settings for offer in offers] == ["train.cast=use"]
