"""train.fallback: all ranks leave a damaged checkpoint aside and resume from the same older one."""

import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from gridformer.checkpoint.copies import choose_checkpoint
from gridformer.checkpoint.manifest import MANIFEST
from gridformer.checkpoint.save import polling
from gridformer.checkpoint.store import RemoteStore
from gridformer.config import TrainConfig
from gridformer.train import saves
from gridformer.train.plan import Plan
from gridformer.utils.errors import CheckpointError
from tests.support.checkpoints import flip_a_bit
from tests.support.multirank.pool import RankFailed, WorkerPool
from tests.support.multirank.runs import STEPS, assert_same_run, plan_of, train

GRID = {"scheme": "megatron", "cols": 2}


def flip(folder: Path) -> None:
    """Flip a bit in the file that the last rank wrote."""
    flip_a_bit(sorted(folder.glob("*.safetensors"))[-1])


def resumed(data: Path, out: Path, **train: Any) -> Plan:
    """Plan to resume with train.fallback, as long as only manifests and sizes are looked at."""
    settings = {"fallback": True, "save_every": 1, "keep_checkpoints": 9, **train}
    plan = replace(plan_of(data, out.with_name("no such run"), GRID, **settings), out=out)
    chosen = choose_checkpoint(TrainConfig(fallback=True), out)
    assert chosen is not None
    return plan.resuming(chosen.folder, chosen.manifest, chosen.older, chosen.damaged)


def test_ranks_agree_on_the_newest_intact_checkpoint(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    """One is found damaged by its manifest, one by a checksum, and losses stay exact."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    pool.run(2, train, plan_of(token_folder, whole, GRID, save_every=1, keep_checkpoints=9))
    shutil.copytree(whole, out)
    names = [f"step-{step:08d}" for step in range(1, STEPS + 1)]
    newest, before = (out / "checkpoints" / name for name in (names[-1], names[-2]))
    (newest / MANIFEST).unlink()
    flip(before)
    with pytest.raises(CheckpointError, match=r"is missing: train\.fallback=true resumes"):
        choose_checkpoint(TrainConfig(), out)
    plan = resumed(token_folder, out)
    assert (plan.resume, plan.resume_step) == (before, STEPS - 1)
    pool.run(2, train, plan)
    assert_same_run(whole, out)
    kept = [f"damaged-{name}" for name in names[-2:]]
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == sorted(kept + names)
    assert not (out / "checkpoints" / kept[1] / MANIFEST).exists()


def train_and_watch(plan: Plan) -> None:
    """Train; the first rank copies a checkpoint once the other one waits in no message."""
    waits, download = plan.out / "waits", RemoteStore.download

    def wait(*args: Any) -> Iterator[None]:
        waits.touch()
        return polling(*args)

    def copy(self: RemoteStore, *args: Any) -> None:
        give_up = time.monotonic() + 60.0
        while not waits.exists():
            assert time.monotonic() < give_up
            time.sleep(0.01)
        download(self, *args)

    with patch.object(RemoteStore, "download", copy), patch.object(saves, "polling", wait):
        train(plan)


def test_an_intact_copy_is_used_before_an_older_checkpoint(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    """The first rank copies it, and the other one is in no message meanwhile."""
    whole, out, url = tmp_path / "whole", tmp_path / "out", f"file://{tmp_path}/far"
    settings: dict[str, Any] = {"save_every": 1, "keep_checkpoints": 9}
    pool.run(2, train, plan_of(token_folder, whole, GRID, **settings))
    shutil.copytree(whole, out)
    folders = [out / f"checkpoints/step-{step:08d}" for step in range(1, STEPS + 1)]
    for folder in folders[:-1]:
        RemoteStore(url).upload(folder)
    shutil.rmtree(folders[-1])
    flip(folders[-2])
    flip(folders[-3])
    plan = resumed(token_folder, out, checkpoint_to=url)
    assert plan.resume == folders[-2]
    pool.run(2, train_and_watch, plan)
    assert_same_run(whole, out)
    names = [folder.name for folder in folders]
    left = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert left == [f"damaged-{names[-2]}", *names], "the one before it is not looked at"
    assert RemoteStore(url).complete() == names


def test_if_all_are_damaged_nothing_is_trained(
    pool: WorkerPool, token_folder: Path, tmp_path: Path
) -> None:
    pool.run(2, train, plan_of(token_folder, tmp_path, GRID, steps=2, save_every=1))
    for folder in (tmp_path / "checkpoints").iterdir():
        flip(folder)
    plan = resumed(token_folder, tmp_path)
    with pytest.raises(RankFailed, match=r"all 2 checkpoints of .* are damaged"):
        pool.run(2, train, plan)
    for folder in (tmp_path / "checkpoints").iterdir():
        (folder / MANIFEST).write_text("{")
    with pytest.raises(CheckpointError, match=r"all 2 checkpoints of .* are damaged"):
        choose_checkpoint(TrainConfig(fallback=True), tmp_path)
