"""float16 on every layout: an overflow on one rank skips the step on all, and runs continue."""

import contextlib
import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gridformer.checkpoint import find
from gridformer.checkpoint.manifest import read_manifest
from gridformer.comm import record_messages
from gridformer.config import LayoutConfig, TrainConfig
from gridformer.models import Model
from gridformer.models.blocks import StyledLayer
from gridformer.parallel import build_parallel
from gridformer.parallel.data.gradients import owned
from gridformer.parallel.data.zero import stored
from gridformer.train.in_flight_steps import FIRST_SCALE
from gridformer.train.metrics import read_metrics
from gridformer.train.plan import Plan
from gridformer.train.step import Stepper
from gridformer.train.trainer import Trainer
from gridformer.utils.batch import next_words
from tests.support.marks import full_unless
from tests.support.multirank.exactness import CPU, TRAIN, axes_of, batch_of, built, compare, tiny
from tests.support.multirank.layouts import Layout
from tests.support.multirank.matrix import MODELS
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.runs import MIDDLE, STEPS, plan_of, start_from, train
from tests.support.multirank.runs import stored as blocks_of

LAYOUTS: dict[str, Layout] = {
    "replicas": {"dp": 2},
    "zero1": {"dp": 2, "dp_mode": "zero1"},
    "fsdp": {"dp": 2, "dp_mode": "fsdp"},
    "megatron": {"scheme": "megatron", "cols": 2},
    "sequence parallel": {"scheme": "megatron", "cols": 2, "sequence_parallel": True},
    "optimus": {"scheme": "optimus", "rows": 2, "cols": 2},
    "optimus, broadcast": {"scheme": "optimus", "rows": 2, "cols": 2, "schedule": "broadcast"},
    "D&SP": {"scheme": "subgraph", "branches": 2},
    "cSub": {"scheme": "subgraph", "branches": 2, "common": "first"},
    "pipeline": {"pp": 2, "micro_batches": 2},
    "pipeline of grids": {"scheme": "optimus", "rows": 2, "cols": 1, "pp": 2, "micro_batches": 2},
}
# Bytes of a number in a message, by its label (docs/reference/precision.md). Activations and
# weights of products are float16, also where fsdp gathers them; rows looked up in the table of
# tokens are float32.
WIDTHS = {
    "product": {2, 4}, "pipeline": {2}, "norm": {4}, "loss": {4}, "gradients": {4},
    "parameters": {2, 4}, "copies": {4}, "metrics": {8},
}  # fmt: skip
# The same layouts with another rank order or grid.
MORE = ("sequence parallel", "optimus, broadcast", "pipeline of grids")


def n_of(layout: Layout) -> int:
    return LayoutConfig(**layout).n_processes


@contextmanager
def overflowing(model: Model, rank: int) -> Iterator[None]:
    """Make one element of one gradient infinite, on one rank only."""
    layers = [module for module in model.modules() if isinstance(module, StyledLayer)]
    weight = layers[0].mlp.up.weight

    def poison(grad: Tensor) -> Tensor:
        poisoned = grad.clone()
        poisoned[0, 0] = math.inf
        return poisoned

    handle = weight.register_hook(poison) if dist.get_rank() == rank else None
    yield
    if handle is not None:
        handle.remove()


# --------------------------------------------------- skipped steps


@dataclass
class Skipping:
    """Three steps of one rank, of which the second overflows on one rank.

    It holds the steps' results, what changed, and the element sizes of messages in bytes, by label.
    """

    skipped: list[bool]
    finite: list[bool]
    scales: list[float]
    changed: list[bool]
    updates: set[float]
    itemsizes: dict[str, set[int]]


def skip_a_step(layout: Layout, rank: int) -> Skipping:
    config = tiny(max_seq_len=8)
    model, axes, plan = built(layout, config, "float16")
    stepper = Stepper(model, TrainConfig(global_batch=8, dtype="float16"), axes, plan)
    found = Skipping([], [], [], [], set(), {})

    def held() -> list[Tensor]:
        state = stepper.updates.state
        mine = [state[p][key] for _, p in owned(model) for key in sorted(state.get(p, {}))]
        return [t.detach().clone() for t in (*map(stored, model.parameters()), *mine)]

    for number in range(3):
        batch, before = batch_of(number, config, 8), held()
        poison = overflowing(model, rank) if number == 1 else contextlib.nullcontext()
        with poison, record_messages() as recorder:
            result = stepper(number, lambda rows: next_words(batch[rows]))  # noqa: B023
        found.skipped.append(result.skipped)
        found.finite.append(math.isfinite(result.grad_norm))
        found.scales.append(stepper.scale.scale)
        same = [torch.equal(a, b) for a, b in zip(before, held())]
        found.changed.append(not all(same))
        for one in recorder.records:
            found.itemsizes.setdefault(one.label, set()).add(one.itemsize)
    found.updates = {float(state["step"]) for state in stepper.updates.state.values()}
    return found


@pytest.mark.parametrize("name", full_unless(lambda name: name not in MORE, LAYOUTS))
def test_an_overflow_on_one_rank_skips_the_step_on_all(pool: WorkerPool, name: str) -> None:
    """Parameters and moments stay the same to the bit, the scale halves, and the next step runs.

    The optimizer counts only updates.
    """
    n = n_of(LAYOUTS[name])
    for found in pool.run(n, skip_a_step, LAYOUTS[name], n - 1):
        assert found.skipped == [False, True, False]
        assert found.finite == [True, False, True]
        assert found.scales == [FIRST_SCALE, FIRST_SCALE / 2, FIRST_SCALE / 2]
        assert found.changed == [True, False, True]
        assert found.updates == {2.0}
        assert found.itemsizes.keys() <= WIDTHS.keys()
        assert all(found.itemsizes[label] <= WIDTHS[label] for label in found.itemsizes)
        assert 2 in found.itemsizes.get("product", {2}), "activations"


# --------------------------------------------------- rows summed together

N_EQUAL = 8  # sequences, all equal: a sum over them is eight times one of them


def largest_scale(layout: Layout) -> int:
    """Return the largest power of two that scales a step's loss without an overflow."""
    torch.set_num_threads(1)
    plan, config = LayoutConfig(**layout), tiny(max_seq_len=4)
    axes = axes_of(plan)
    rows = next_words(batch_of(0, config, 1).expand(N_EQUAL, -1))
    settings = TrainConfig(global_batch=N_EQUAL, dtype="float16")
    for power in range(30, 0, -1):
        model = build_parallel(config, plan, axes, 1, CPU, "float16")
        stepper = Stepper(model, settings, axes, plan)
        stepper.scale.scale = 2.0**power
        if not stepper(0, lambda part: {key: x[part] for key, x in rows.items()}).skipped:
            return power
    raise AssertionError("every scale overflows")


def test_overflow_depends_on_what_is_summed_in_float16(pool: WorkerPool) -> None:
    """Check the example in docs/reference/precision.md.

    A product sums the rows that a device has at once into a float16 result; micro-batches and
    replicas are summed in float32.
    """
    (together,) = pool.run(1, largest_scale, {})
    (halves,) = pool.run(1, largest_scale, {"micro_batches": 2})
    (one_by_one,) = pool.run(1, largest_scale, {"micro_batches": N_EQUAL})
    assert together < halves < one_by_one
    for layout, wanted in (({"dp": 2}, halves), ({"dp": 2, "micro_batches": 4}, one_by_one)):
        assert pool.run(2, largest_scale, layout) == [wanted] * 2


# --------------------------------------------------- against one device


FAMILY_CASES = [(name, model) for name in LAYOUTS for model in MODELS]


@pytest.mark.parametrize(
    "case",
    full_unless(lambda case: case in (("optimus", "GPT-2"), ("D&SP", "Transformer")), FAMILY_CASES),
    ids="-".join,
)
def test_stays_close_to_one_device(pool: WorkerPool, case: tuple[str, str]) -> None:
    """The reference device computes in float16, too."""
    name, family = case
    model = {"max_seq_len": 12, "dropout": 0.1, "attention_dropout": 0.1, **MODELS[family]}
    settings = {**TRAIN, "dtype": "float16"}
    for worst in pool.run(n_of(LAYOUTS[name]), compare, LAYOUTS[name], model, settings, 3):
        assert worst["initial"] == 0.0
        assert worst["loss"] < 5e-4
        assert worst["norm"] < 1e-2


# --------------------------------------------------- complete runs


def train_with_overflow(plan: Plan, at: int) -> str:
    """Run the production trainer with an overflow on the last rank at step `at` (from 0).

    Returns the trainer's report.
    """
    original = Trainer._start

    def start(trainer: Trainer, number: int) -> None:
        poison = overflowing(trainer.model, dist.get_world_size() - 1)
        with poison if number == at else contextlib.nullcontext():
            original(trainer, number)

    with patch.object(Trainer, "_start", start), contextlib.redirect_stdout(io.StringIO()) as said:
        train(plan)
    return said.getvalue()


def test_a_skipped_step_is_reported_and_survives_a_checkpoint(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    """A skipped step is reported in metrics.jsonl and on the terminal.

    A resumed run is exact to the bit under the same layout; under another one, the scale and the
    counts are the same.
    """
    layout: Layout = {"dp": 2, "dp_mode": "zero1"}
    whole, resumed, moved = (tmp_path / name for name in ("whole", "resumed", "moved"))
    said, *_ = pool.run(
        2, train_with_overflow, plan_of(token_folder, whole, layout, dtype="float16"), 1
    )
    assert (
        "step 2: gradients overflowed float16; nothing was updated, and the loss is now scaled by "
        "32768" in said
    )
    lines = [line for line in read_metrics(whole) if line["step"]]
    assert [line["skipped"] for line in lines] == [line["step"] == 2 for line in lines]
    assert ["grad_norm" in line for line in lines] == [line["step"] != 2 for line in lines]
    assert [line["loss_scale"] for line in lines] == [FIRST_SCALE] + [FIRST_SCALE / 2] * (STEPS - 1)
    assert all(math.isfinite(line["loss"]) for line in lines)

    other = {"scheme": "megatron", "cols": 2}
    for out, how in ((resumed, layout), (moved, other)):
        start_from(whole, out)
        plan = plan_of(token_folder, out, how, dtype="float16")
        assert plan.resume is not None
        saved = read_manifest(plan.resume)
        assert (saved.step, saved.skipped) == (MIDDLE, 1)
        assert (saved.loss_scale, saved.good_steps) == (FIRST_SCALE / 2, MIDDLE - 2)
        pool.run(2, train, plan)
        found = find.latest(out)
        assert found is not None
        last = read_manifest(found)
        assert (last.step, last.skipped) == (STEPS, 1)
        assert (last.loss_scale, last.good_steps) == (FIRST_SCALE / 2, STEPS - 2)
    assert told(resumed) == told(whole)
    want, got = blocks_of(whole), blocks_of(resumed)
    assert all(torch.equal(want[key], got[key]) for key in want)
    for step, (loss, norm) in told(whole).items():
        assert told(moved)[step] == (pytest.approx(loss, rel=1e-3), pytest.approx(norm, rel=1e-2))


def told(out: Path) -> dict[int, tuple[float, float]]:
    """Return loss and norm of each step that was not skipped."""
    return {
        line["step"]: (line["loss"], line["grad_norm"])
        for line in read_metrics(out)
        if "grad_norm" in line
    }


def test_another_type_resumes_from_float16(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    """The other type's loss is not scaled, and skipped steps do not count as updates."""
    plan = plan_of(token_folder, tmp_path, {"dp": 2}, dtype="float16", save_every=0, steps=MIDDLE)
    pool.run(2, train_with_overflow, plan, 1)
    pool.run(2, train, plan_of(token_folder, tmp_path, {"dp": 2}, dtype="float32"))
    found = find.latest(tmp_path)
    assert found is not None
    last = read_manifest(found)
    assert (last.skipped, last.loss_scale, last.good_steps) == (1, 1.0, 0)
    assert [*told(tmp_path)] == [1, *range(3, STEPS + 1)]
