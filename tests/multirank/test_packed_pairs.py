"""Runs on packed pairs: every layout has the losses of one device, also after it resumes there."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gridformer.data import TokenFolder, open_samples
from gridformer.data.prepare.prepare import prepare_corpus
from gridformer.launch.plan import plan_run
from gridformer.mesh import Axes
from gridformer.parallel import build_parallel
from gridformer.train.metrics import read_metrics
from gridformer.train.plan import Plan
from gridformer.train.step import Stepper
from gridformer.utils.batch import Batch
from tests.support.data import pairs_source
from tests.support.marks import full_unless
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.runs import MIDDLE, STEPS, assert_same_run, start_from, train

SIZE = {"n_layers": 2, "hidden_size": 24, "n_heads": 4, "max_seq_len": 64, "dropout": 0.1}
TRAIN = {
    "steps": STEPS,
    "global_batch": 8,
    "lr": 3e-3,
    "eval_every": 0,
    "eval_batches": 1,
    "save_every": MIDDLE,
    "dtype": "float64",
    "sanity_checks": True,
}
PACKED = {"document_mask": True, "packing": "documents"}
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


def plan(data: Path, out: Path, family: str, layout: dict[str, Any], more: dict[str, Any]) -> Plan:
    sections = {
        "model": {"family": family, **SIZE},
        "data": {"path": str(data), "task": "pairs", "source_len": 56, "seq_len": 64, **more},
        "layout": layout,
        "train": TRAIN,
    }
    file = out.with_suffix(".yaml")
    file.write_text(json.dumps(sections))  # JSON is also YAML
    return plan_run(file, out=out)


@pytest.mark.parametrize("name", full_unless("optimus".__eq__, LAYOUTS))
def test_every_layout_trains_on_the_same_pairs(
    pool: WorkerPool, data: TokenFolder, tmp_path: Path, name: str
) -> None:
    family, layout = LAYOUTS[name]
    whole = plan(data.path, tmp_path / "whole", family, {}, PACKED)
    pool.run(1, train, whole)
    start_from(whole.out, tmp_path / "moved")
    moved = plan(data.path, tmp_path / "moved", family, layout, PACKED)
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
    found = []
    for name, more in (("alone", {}), ("packed", PACKED)):
        run = plan(data.path, tmp_path / name, family, {}, more).run
        samples = open_samples(run, data.val, data.tokenizer)
        draw = np.random.default_rng(0)
        every = [samples.sample(number, draw) for number in range(samples.n_samples)]
        batch = {key: torch.tensor(np.stack([one[key] for one in every])) for key in every[0]}
        train = run.train.model_copy(update={"global_batch": len(every)})
        cpu = torch.device("cpu")
        model = build_parallel(run.model, run.layout, Axes(), 1, cpu, "float64")
        stepper = Stepper(model, train, Axes(), run.layout)
        found.append((len(every), stepper.evaluate([partial(_given, batch)]).loss))
    (n_alone, alone), (n_packed, packed) = found
    assert n_packed < n_alone / 2
    assert packed == pytest.approx(alone, rel=1e-12)


def _given(batch: Batch, _: object) -> Batch:
    return batch
