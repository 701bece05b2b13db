"""Runs on conversations: every layout has the losses of one device, also after it resumes there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gridformer.launch.plan import plan_run
from gridformer.train.plan import Plan
from tests.support.chats import chat_folder
from tests.support.marks import full_unless
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.runs import MIDDLE, STEPS, assert_same_run, start_from, train

SIZE = {"n_layers": 2, "hidden_size": 24, "n_heads": 4, "max_seq_len": 32, "dropout": 0.1}
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
    "pipeline": ("gpt2", {"scheme": "single", "pp": 2, "micro_batches": 4}),
}


def plan(data: Path, out: Path, family: str, layout: dict[str, Any]) -> Plan:
    sections = {
        "model": {"family": family, **SIZE},
        "data": {"path": str(data), "task": "chat"},
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
    whole = plan(data, tmp_path / "whole", family, {})
    pool.run(1, train, whole)
    assert (whole.out / "chat.json").is_file(), "generation needs the template"
    start_from(whole.out, tmp_path / "moved")
    moved = plan(data, tmp_path / "moved", family, layout)
    pool.run(moved.n_processes, train, moved)
    assert_same_run(whole.out, moved.out)
