"""Runs of pipelines: resumed elsewhere, moved and compiled, and what precedes the first input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gridformer.checkpoint import checkpoint, find
from gridformer.comm import record_messages
from gridformer.config import LayoutConfig
from gridformer.models.blocks import copy_of
from gridformer.parallel import build_parallel
from gridformer.parallel.pipeline import Event
from gridformer.train.compile import compile_model
from tests.support.checkpoints import save_checkpoint
from tests.support.marks import full_unless
from tests.support.multirank.exactness import CPU, axes_of, distance, values
from tests.support.multirank.pipelines import SETTINGS, Layout, family, reads_of, stepper_of
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.replicas import SINGLE, read_of, settings_of
from tests.support.multirank.runs import plan_of

ONE: Layout = {}
TWO: Layout = {"pp": 2, "micro_batches": 4}
INTERLEAVED: Layout = {"pp": 2, "stages_per_rank": 2, "micro_batches": 4}


def moved_through(layouts: list[Layout], name: Any, out: Path) -> float:
    """Return how far a model is from itself after its checkpoints went from layout to layout."""
    config = family(name)
    run = plan_of(out, out, {}).run.model_copy(update={"model": config})
    first = None
    for step, layout in enumerate(layouts):
        plan = LayoutConfig(**layout)
        axes = axes_of(plan)
        stepper = stepper_of(config, plan, axes)
        if step:
            found = find.latest(out)
            assert found is not None
            checkpoint.load(found, stepper.model, stepper.updates, axes)
        else:
            stepper(0, reads_of(config, 1)[0])
            first = stepper.model
        save_checkpoint(out, step + 1, 0, run, stepper.model, stepper.updates, axes)
    assert first is not None
    return distance(stepper.model, values(stepper.model), values(first))


@pytest.mark.parametrize("name", full_unless(lambda n: n == "t5", ["bert", "t5", "transformer"]))
def test_every_family_moves(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    """From four stages to two interleaved ones with replicas, to a grid, and back, bit by bit."""
    layouts = [
        {"pp": 4, "micro_batches": 4},
        {"pp": 2, "dp": 2, "stages_per_rank": 2, "micro_batches": 2},
        {"scheme": "optimus", "rows": 2, "cols": 2},
        {"pp": 4, "micro_batches": 4},
    ]
    assert pool.run(4, moved_through, layouts, name, tmp_path) == [0.0] * 4


def compiled(layout: Layout) -> list[float]:
    torch.set_num_threads(1)
    plan, config, found = LayoutConfig(**layout), family("gpt2", n_layers=2), []
    for compiles in (False, True):
        axes = axes_of(plan)
        stepper = stepper_of(config, plan, axes)
        if compiles:
            compile_model(stepper.model, "eager")
        found.append([stepper(step, read).loss for step, read in enumerate(reads_of(config, 2))])
    return [abs(a / b - 1) for a, b in zip(*found)]


@pytest.mark.full  # tests/train/test_compile.py tests compiled blocks
def test_blocks_of_stages_can_be_compiled(pool: WorkerPool) -> None:
    """Blocks contain no messages, which go between links."""
    for differences in pool.run(2, compiled, {"pp": 2, "micro_batches": 2}):
        assert max(differences) < 1e-9


def held(layout: Layout) -> list[int]:
    plan, config = LayoutConfig(**layout), family("gpt2", n_layers=8)
    model = build_parallel(config, plan, axes_of(plan), 1, CPU, SETTINGS.dtype)
    layers = [name for name, _ in model.named_parameters() if name.startswith("layers")]
    return sorted({int(name.split(".")[1]) for name in layers})


def test_interleaved_stages_are_not_adjacent(pool: WorkerPool) -> None:
    first, second = pool.run(2, held, {"pp": 2, "stages_per_rank": 2, "micro_batches": 2})
    assert (first, second) == ([0, 1, 4, 5], [2, 3, 6, 7])


def gathers_before_the_first_input(layout: Layout) -> list[int]:
    """Return how many gathers of a later stage have started when its first input is there."""
    built, axes, stepper = settings_of(layout, 4)
    gathers: list[int] = []
    with record_messages() as recorder:

        def note(event: Event) -> None:
            if event.kind == "recv":
                gathers.append(recorder.count("parameters").total())

        stepper.executor.on_action = note
        stepper(0, read_of(built, 0))
    return gathers[:1] if axes.pp.index else []


@pytest.mark.parametrize(("reshard", "layers"), [("step", 2), ("layer", 1)])
def test_stages_gather_while_they_wait_for_their_first_input(
    pool: WorkerPool, reshard: str, layers: int
) -> None:
    """They have nothing else to do then; afterwards each gather would delay all later stages."""
    layout = {**SINGLE, "dp_mode": "fsdp", "reshard": reshard, "pp": 2, "micro_batches": 2}
    found = pool.run(4, gathers_before_the_first_input, layout)
    assert sorted(found) == [[], [], [1 + layers], [1 + layers]]  # 1 for all outside layers


def casts_before_the_first_input(layout: Layout) -> tuple[int, int]:
    """Return how many weights of a later stage are cast when its first input is there, and all."""
    built, axes, stepper = settings_of(layout, 4, "bfloat16", vocab_size=97)
    copies = [copy for p in built.parameters() if (copy := copy_of(p)) is not None]
    made: list[int] = []

    def note(event: Event) -> None:
        if event.kind == "recv":
            made.append(sum(copy.value is not None for copy in copies))

    stepper.executor.on_action = note
    stepper(0, read_of(built, 0))
    return (made[0], len(copies)) if axes.pp.index else (0, 0)


CASES: list[Layout] = [
    {"scheme": "single", "pp": 2, "micro_batches": 2},
    {"scheme": "subgraph", "branches": 2, "pp": 2, "micro_batches": 2},
]


@pytest.mark.parametrize("layout", full_unless(lambda one: one is CASES[0], CASES))
def test_stages_cast_weights_while_they_wait_for_their_first_input(
    pool: WorkerPool, layout: Layout
) -> None:
    found = pool.run(2 * layout.get("branches", 1), casts_before_the_first_input, layout)
    later = [one for one in found if one != (0, 0)]
    assert len(later) == len(found) // 2
    for made, copies in later:
        assert made == copies > 8
