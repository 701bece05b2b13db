"""Mixtures of sources: every layout and every resumed run reads the same samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gridformer.config import DataConfig, LayoutConfig
from gridformer.data.prepare.corpus import prepare_corpus
from gridformer.data.prepare.sources import open_sources
from gridformer.data.tokenizer import Tokenizer
from gridformer.evaluate.examples import measure_set
from gridformer.evaluate.loading import load_model
from gridformer.train.metrics import read_metrics
from gridformer.train.plan import Plan
from tests.support.multirank.exactness import CPU, axes_of
from tests.support.multirank.layouts import n_of
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.runs import STEPS, assert_same_run, plan_of, start_from, train

GRID: dict[str, Any] = {"scheme": "optimus", "rows": 2, "cols": 2, "micro_batches": 2}
REPLICAS: dict[str, Any] = {"scheme": "megatron", "cols": 2, "dp": 2}


@pytest.fixture(scope="module")
def second(token_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of other text with the tokenizer of `token_folder`."""
    folder = tmp_path_factory.mktemp("second")
    for number in range(6):
        text = "".join(f"{i} and {i + number} of line\n" for i in range(120))
        (folder / f"{number}.txt").write_text(text)
    sources, tokenizer = open_sources([str(folder)]), Tokenizer.load(token_folder)
    prepare_corpus(sources, folder / "tokens", tokenizer=tokenizer, val_fraction=0.3)
    return folder / "tokens"


def mixed(plan: Plan, data: Path, second: Path) -> Plan:
    """Return a plan that reads both folders, with other weights from the fourth step on."""
    values = {
        "sources": [
            {"name": "one", "path": str(data), "weight": 0.7},
            {"name": "two", "path": str(second), "weight": 0.3},
        ],
        "stages": [{"from_step": 4, "weights": {"one": 1, "two": 2}}],
        "test": [{"name": "two"}, {"name": "seen", "path": str(data), "split": "train"}],
        "seq_len": 12,
    }
    return replace(
        plan, run=plan.run.model_copy(update={"data": DataConfig.model_validate(values)})
    )


def measured(run_dir: Path, layout: dict[str, Any], names: Sequence[str]) -> list[dict[str, float]]:
    """Measure named sets on a layout; the work of one rank."""
    chosen = LayoutConfig.model_validate(layout)
    trained = load_model(run_dir, CPU, chosen, axes_of(chosen))
    return [measure_set(trained, name) for name in names]


def test_a_mixture_is_the_same_on_every_layout_and_after_resume(
    pool: WorkerPool, token_folder: Path, second: Path, tmp_path: Path
) -> None:
    """One device runs all steps; a grid stops before the stage changes, and replicas go on."""
    alone, grid = tmp_path / "alone", tmp_path / "grid"
    pool.run(1, train, mixed(plan_of(token_folder, alone, {}), token_folder, second))
    pool.run(n_of(GRID), train, mixed(plan_of(token_folder, grid, GRID), token_folder, second))
    assert_same_run(alone, grid)
    moved = tmp_path / "moved"
    start_from(grid, moved)
    plan = mixed(plan_of(token_folder, moved, REPLICAS), token_folder, second)
    assert plan.resume_step == 3
    pool.run(n_of(REPLICAS), train, plan)
    assert_same_run(alone, moved)
    last = read_metrics(alone)[-1]
    assert last["step"] == STEPS
    both = (last["val_loss_one"], last["val_loss_two"])
    assert last["val_loss"] == pytest.approx(sum(both) / 2, rel=1e-12)
    assert abs(both[0] - both[1]) > 1e-3, "each set has its own text"
    names = ("val_loss_one", "val_loss_two", "test_loss_two", "test_loss_seen")
    for name in names:
        assert read_metrics(moved)[-1][name] == pytest.approx(last[name], rel=1e-9)
    assert last["test_loss_two"] == last["val_loss_two"], "it is the same text"
    # `gridformer evaluate --set` measures the same, on any layout.
    named = {"one": "val_loss_one", "test/two": "test_loss_two", "seen": "test_loss_seen"}
    for layout in ({}, {"scheme": "megatron", "cols": 2, "pp": 2, "micro_batches": 2}):
        for found in pool.run(n_of(layout), measured, alone, layout, [*named]):
            for (name, key), numbers in zip(named.items(), found):
                assert numbers["loss"] == pytest.approx(last[key], rel=1e-9), name
                assert numbers["perplexity"] == pytest.approx(math.exp(last[key]), rel=1e-9)
    earlier = read_metrics(alone)[0]
    assert {"val_loss_one", "val_loss_two"} <= earlier.keys()
    assert not {"test_loss_two", "test_loss_seen"} & earlier.keys(), "read at the end only"
