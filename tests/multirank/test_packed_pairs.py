"""Runs on packed pairs: every layout has the losses of one device, also after it resumes there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gridformer.data import TokenFolder
from gridformer.data.prepare.corpus import prepare_corpus
from gridformer.train.metrics import read_metrics
from tests.support.data import pairs_source
from tests.support.marks import full_unless
from tests.support.multirank.packed_runs import PACKED, loss_of_all, plan
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.runs import STEPS, assert_same_run, start_from, train

PAIRS = {"task": "pairs", "source_len": 56}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "optimus": ("transformer", {"scheme": "optimus", "rows": 2, "cols": 1}),
    "megatron": ("t5", {"scheme": "megatron", "cols": 2, "sequence_parallel": True, "dp": 2}),
    "megatron-2d": ("transformer", {"scheme": "megatron_2d", "rows": 2, "cols": 2}),
    "subgraph": ("t5", {"scheme": "subgraph", "branches": 2, "dp": 2, "dp_mode": "fsdp"}),
    "pipeline": ("transformer", {"scheme": "single", "pp": 2, "micro_batches": 4}),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TokenFolder:
    out = tmp_path_factory.mktemp("pairs") / "t"
    return prepare_corpus([pairs_source(120)], out, vocab_size=300, val_fraction=0.2)


@pytest.mark.parametrize("name", full_unless("optimus".__eq__, LAYOUTS))
def test_every_layout_trains_on_the_same_pairs(
    pool: WorkerPool, data: TokenFolder, tmp_path: Path, name: str
) -> None:
    family, layout = LAYOUTS[name]
    packed = {"path": data.path, **PAIRS, **PACKED}
    whole = plan(tmp_path / "whole", family, {}, **packed)
    pool.run(1, train, whole)
    start_from(whole.out, tmp_path / "moved")
    moved = plan(tmp_path / "moved", family, layout, **packed)
    pool.run(moved.n_processes, train, moved)
    assert_same_run(whole.out, moved.out)
    # Rows are nearly full, so steps have about the same number of tokens.
    tokens = np.diff([0, *(line["tokens"] for line in read_metrics(whole.out) if line["step"])])
    most = (56 + 64) * whole.run.train.global_batch
    assert len(tokens) == STEPS
    assert (tokens > 0.6 * most).all()
    assert (tokens <= most).all()


@pytest.mark.parametrize("family", ["transformer", "t5"])
def test_packed_pairs_have_the_loss_that_they_have_alone(
    data: TokenFolder, tmp_path: Path, family: str
) -> None:
    given = {"path": data.path, **PAIRS}
    n_alone, alone = loss_of_all(plan(tmp_path / "alone", family, {}, **given), data)
    n_packed, packed = loss_of_all(plan(tmp_path / "packed", family, {}, **given, **PACKED), data)
    assert n_packed < n_alone / 2
    assert packed == pytest.approx(alone, rel=1e-12)
