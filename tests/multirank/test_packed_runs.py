"""Runs on packed documents and on mixtures, on many layouts."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gridformer.config import DataConfig, LayoutConfig
from gridformer.data import TokenFolder
from gridformer.data.prepare.corpus import prepare_corpus
from gridformer.data.prepare.sources import open_sources
from gridformer.data.tokenizer import Tokenizer
from gridformer.evaluate.examples import measure_set
from gridformer.evaluate.loading import load_model
from gridformer.train.metrics import read_metrics
from gridformer.train.plan import Plan
from tests.support.chats import chat_folder
from tests.support.data import pairs_source
from tests.support.marks import full_unless
from tests.support.multirank.exactness import CPU, axes_of
from tests.support.multirank.layouts import Layout, n_of
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.runs import (
    PACKED,
    STEPS,
    assert_same_run,
    loss_of_all,
    plan,
    plan_of,
    start_from,
    train,
)

OPTIMUS: Layout = {"scheme": "optimus", "rows": 2, "cols": 1}
SEQUENCE: Layout = {"scheme": "megatron", "cols": 2, "sequence_parallel": True, "dp": 2}
WEIGHTS_TOO: Layout = {"scheme": "megatron_2d", "rows": 2, "cols": 2}
BRANCHES: Layout = {"scheme": "subgraph", "branches": 2, "dp": 2, "dp_mode": "fsdp"}
PIPELINE: Layout = {"scheme": "single", "pp": 2, "micro_batches": 4}
PAIRS = {"task": "pairs", "source_len": 56}


def same_on(
    pool: WorkerPool, folder: Path, family: str, layout: Layout, data: dict[str, Any]
) -> Plan:
    """Train on one device, and again with the second half on a layout; return the first plan."""
    whole = plan(folder / "whole", family, {}, **data)
    pool.run(1, train, whole)
    start_from(whole.out, folder / "moved")
    moved = plan(folder / "moved", family, layout, **data)
    pool.run(moved.n_processes, train, moved)
    assert_same_run(whole.out, moved.out)
    return whole


CHATS = {
    "optimus": ("llama", OPTIMUS),
    "megatron": ("llama", SEQUENCE),
    "megatron-2d": ("gpt2", WEIGHTS_TOO),
    "subgraph": ("gpt2", BRANCHES),
    "packed": ("llama", OPTIMUS),
    "pipeline": ("gpt2", PIPELINE),
}


@pytest.mark.parametrize("name", full_unless("optimus".__eq__, CHATS))
def test_every_layout_learns_the_same_answers(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    data = {"path": chat_folder(tmp_path).path, "task": "chat"}
    whole = same_on(pool, tmp_path, *CHATS[name], data | (PACKED if name == "packed" else {}))
    assert (whole.out / "chat.json").is_file(), "generation needs the template"


def test_packed_conversations_have_the_loss_that_they_have_alone(tmp_path: Path) -> None:
    data = chat_folder(tmp_path)
    given = {"path": data.path, "task": "chat"}
    _, alone = loss_of_all(plan(tmp_path / "alone", "llama", {}, **given), data)
    _, packed = loss_of_all(plan(tmp_path / "packed", "llama", {}, **given, **PACKED), data)
    assert packed == pytest.approx(alone, rel=1e-12)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> TokenFolder:
    out = tmp_path_factory.mktemp("pairs") / "t"
    return prepare_corpus([pairs_source(120)], out, vocab_size=300, val_fraction=0.2)


TRANSLATIONS = {
    "optimus": ("transformer", OPTIMUS),
    "megatron": ("t5", SEQUENCE),
    "megatron-2d": ("transformer", WEIGHTS_TOO),
    "subgraph": ("t5", BRANCHES),
    "pipeline": ("transformer", PIPELINE),
}


@pytest.mark.parametrize("name", full_unless("optimus".__eq__, TRANSLATIONS))
def test_every_layout_trains_on_the_same_pairs(
    pool: WorkerPool, pairs: TokenFolder, tmp_path: Path, name: str
) -> None:
    given = {"path": pairs.path, **PAIRS, **PACKED}
    whole = same_on(pool, tmp_path, *TRANSLATIONS[name], given)
    # Rows are nearly full, so steps have about the same number of tokens.
    tokens = np.diff([0, *(line["tokens"] for line in read_metrics(whole.out) if line["step"])])
    most = (56 + 64) * whole.run.train.global_batch
    assert len(tokens) == STEPS
    assert (tokens > 0.6 * most).all()
    assert (tokens <= most).all()


@pytest.mark.parametrize("family", ["transformer", "t5"])
def test_packed_pairs_have_the_loss_that_they_have_alone(
    pairs: TokenFolder, tmp_path: Path, family: str
) -> None:
    given = {"path": pairs.path, **PAIRS}
    n_alone, alone = loss_of_all(plan(tmp_path / "alone", family, {}, **given), pairs)
    n_packed, packed = loss_of_all(plan(tmp_path / "packed", family, {}, **given, **PACKED), pairs)
    assert n_packed < n_alone / 2
    assert packed == pytest.approx(alone, rel=1e-12)


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
