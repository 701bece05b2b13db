"""Runs on conversations: every layout has the losses of one device, also after it resumes there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.chats import chat_folder
from tests.support.marks import full_unless
from tests.support.multirank.packed_runs import PACKED, loss_of_all, plan
from tests.support.multirank.pool import WorkerPool
from tests.support.multirank.runs import assert_same_run, start_from, train

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "optimus": ("llama", {"scheme": "optimus", "rows": 2, "cols": 1}),
    "megatron": ("llama", {"scheme": "megatron", "cols": 2, "sequence_parallel": True, "dp": 2}),
    "megatron-2d": ("gpt2", {"scheme": "megatron_2d", "rows": 2, "cols": 2}),
    "subgraph": ("gpt2", {"scheme": "subgraph", "branches": 2, "dp": 2, "dp_mode": "fsdp"}),
    "packed": ("llama", {"scheme": "optimus", "rows": 2, "cols": 1}),
    "pipeline": ("gpt2", {"scheme": "single", "pp": 2, "micro_batches": 4}),
}


@pytest.mark.parametrize("name", full_unless("optimus".__eq__, LAYOUTS))
def test_every_layout_learns_the_same_answers(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    family, layout = LAYOUTS[name]
    data = chat_folder(tmp_path).path
    given = {"path": data, "task": "chat", **(PACKED if name == "packed" else {})}
    whole = plan(tmp_path / "whole", family, {}, **given)
    pool.run(1, train, whole)
    assert (whole.out / "chat.json").is_file(), "generation needs the template"
    start_from(whole.out, tmp_path / "moved")
    moved = plan(tmp_path / "moved", family, layout, **given)
    pool.run(moved.n_processes, train, moved)
    assert_same_run(whole.out, moved.out)


def test_packed_conversations_have_the_loss_that_they_have_alone(tmp_path: Path) -> None:
    data = chat_folder(tmp_path)
    given = {"path": data.path, "task": "chat"}
    _, alone = loss_of_all(plan(tmp_path / "alone", "llama", {}, **given), data)
    _, packed = loss_of_all(plan(tmp_path / "packed", "llama", {}, **given, **PACKED), data)
    assert packed == pytest.approx(alone, rel=1e-12)
