"""Runs on conversations: every layout has the losses of one device, also after it resumes there."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gridformer.data.samples.batches import open_samples
from gridformer.data.samples.order import Rows
from gridformer.launch.plan import plan_run
from gridformer.mesh import Axes
from gridformer.parallel import build_parallel
from gridformer.train.plan import Plan
from gridformer.train.step import Stepper
from gridformer.utils.batch import Batch
from tests.support.chats import chat_folder
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
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "optimus": ("llama", {"scheme": "optimus", "rows": 2, "cols": 1}),
    "megatron": ("llama", {"scheme": "megatron", "cols": 2, "sequence_parallel": True, "dp": 2}),
    "megatron-2d": ("gpt2", {"scheme": "megatron_2d", "rows": 2, "cols": 2}),
    "subgraph": ("gpt2", {"scheme": "subgraph", "branches": 2, "dp": 2, "dp_mode": "fsdp"}),
    "packed": ("llama", {"scheme": "optimus", "rows": 2, "cols": 1}),
    "pipeline": ("gpt2", {"scheme": "single", "pp": 2, "micro_batches": 4}),
}


PACKED = {"document_mask": True, "packing": "documents", "seq_len": 64}


def plan(data: Path, out: Path, family: str, layout: dict[str, Any], more: dict[str, Any]) -> Plan:
    sections = {
        "model": {"family": family, **SIZE},
        "data": {"path": str(data), "task": "chat", **more},
        "layout": layout,
        "train": TRAIN,
    }
    file = out.with_suffix(".yaml")
    file.write_text(json.dumps(sections))  # JSON is also YAML
    return plan_run(file, out=out)


@pytest.mark.parametrize("name", full_unless("optimus".__eq__, LAYOUTS))
def test_every_layout_learns_the_same_answers(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    family, layout = LAYOUTS[name]
    data = chat_folder(tmp_path).path
    more = PACKED if name == "packed" else {}
    whole = plan(data, tmp_path / "whole", family, {}, more)
    pool.run(1, train, whole)
    assert (whole.out / "chat.json").is_file(), "generation needs the template"
    start_from(whole.out, tmp_path / "moved")
    moved = plan(data, tmp_path / "moved", family, layout, more)
    pool.run(moved.n_processes, train, moved)
    assert_same_run(whole.out, moved.out)


def test_packed_conversations_have_the_loss_that_they_have_alone(tmp_path: Path) -> None:
    data = chat_folder(tmp_path)
    found = []
    for name, more in (("alone", {}), ("packed", PACKED)):
        run = plan(data.path, tmp_path / name, "llama", {}, more).run
        samples = open_samples(run, data.val, data.tokenizer)
        draw = np.random.default_rng(0)
        every = [samples.sample(number, draw) for number in range(samples.n_samples)]
        batch = {key: torch.tensor(np.stack([one[key] for one in every])) for key in every[0]}
        train = run.train.model_copy(update={"global_batch": len(every)})
        cpu = torch.device("cpu")
        model = build_parallel(run.model, run.layout, Axes(), 1, cpu, "float64")
        stepper = Stepper(model, train, Axes(), run.layout)
        found.append(stepper.evaluate([partial(_given, batch)]).loss)
    assert found[1] == pytest.approx(found[0], rel=1e-12)


def _given(batch: Batch, rows: Rows) -> Batch:
    return batch
