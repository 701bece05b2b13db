"""Runs whose samples share rows, or are conversations: every layout has one device's losses.

They have them also after a run resumes there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gridformer.data import TokenFolder
from gridformer.data.prepare.corpus import prepare_corpus
from gridformer.train.metrics import read_metrics
from gridformer.train.plan import Plan
from tests.support.chats import chat_folder
from tests.support.data import pairs_source
from tests.support.marks import full_unless
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.runs import (
    PACKED,
    STEPS,
    assert_same_run,
    loss_of_all,
    plan,
    start_from,
    train,
)

Layout = dict[str, Any]

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
