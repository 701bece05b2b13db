"""Checkpoints that must not be loaded are refused by file name, and nothing is executed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gridformer.batch import next_words
from gridformer.comm import Axes
from gridformer.config import LayoutConfig, RunConfig, parse_run
from gridformer.errors import CheckpointError
from gridformer.models import Model
from gridformer.parallel import build_parallel
from gridformer.train import checkpoint
from gridformer.train.step import Stepper

MODEL = {"n_layers": 1, "hidden_size": 8, "n_heads": 2, "vocab_size": 11, "max_seq_len": 4}
CPU = torch.device("cpu")


def a_run() -> RunConfig:
    return parse_run({"model": MODEL, "data": {"path": "unused"}, "train": {"global_batch": 2}})


def a_model(run: RunConfig, seed: int) -> tuple[Model, Stepper]:
    model = build_parallel(run.model, LayoutConfig(), Axes(), seed, CPU)
    return model, Stepper(model, run.train, Axes())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    run = a_run()
    model, stepper = a_model(run, seed=1)
    batch = torch.randint(0, 11, (2, 5))
    stepper(0, lambda rows: next_words(batch[rows]))
    return checkpoint.save(tmp_path, 1, 8, run, model, stepper.updates, Axes())


def test_round_trip(saved: Path) -> None:
    run = a_run()
    want, want_stepper = a_model(run, seed=1)
    manifest = checkpoint.load(saved, want, want_stepper.updates, Axes())
    got, got_stepper = a_model(run, seed=2)
    assert not torch.equal(got.get_parameter("tokens.weight"), want.get_parameter("tokens.weight"))
    checkpoint.load(saved, got, got_stepper.updates, Axes())
    assert (manifest.step, manifest.tokens) == (1, 8)
    for (name, a), b in zip(want.named_parameters(), got.parameters()):
        assert torch.equal(a, b), name
        for key in ("exp_avg", "exp_avg_sq", "step"):
            left = want_stepper.updates.state[a][key]
            assert torch.equal(left, got_stepper.updates.state[b][key]), (name, key)
    assert any(s["exp_avg"].abs().max() > 0 for s in got_stepper.updates.state.values())


def shard(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def truncate(folder: Path) -> Path:
    path = shard(folder)
    os.truncate(path, path.stat().st_size - 7)
    return path


def flip_a_bit(folder: Path) -> Path:
    path = shard(folder)
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)
    return path


def remove(folder: Path) -> Path:
    path = shard(folder)
    path.unlink()
    return path


def add_a_foreign_file(folder: Path) -> Path:
    path = folder / "shard-00009-model-00001-of-00001.safetensors"
    shutil.copy(shard(folder), path)
    return path


def cut_the_manifest(folder: Path) -> Path:
    path = folder / checkpoint.MANIFEST
    os.truncate(path, path.stat().st_size // 2)
    return path


def another_programs_manifest(folder: Path) -> Path:
    path = folder / checkpoint.MANIFEST
    path.write_text(json.dumps({"format": "something-else"}))
    return path


def a_file_outside(folder: Path) -> Path:
    path = folder / checkpoint.MANIFEST
    content = json.loads(path.read_text())
    content["files"]["../../other.safetensors"] = {"bytes": 1, "crc32": 1}
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        flip_a_bit,
        remove,
        add_a_foreign_file,
        cut_the_manifest,
        another_programs_manifest,
        a_file_outside,
    ],
)
def test_damage_is_refused_by_name(saved: Path, damage: Callable[[Path], Path]) -> None:
    culprit = damage(saved)
    model, stepper = a_model(a_run(), seed=2)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(saved, model, stepper.updates, Axes())
    assert str(culprit) in str(error.value)
    assert "\n" not in str(error.value)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_a_folder_without_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no gridformer checkpoint"):
        checkpoint.verify(tmp_path)


class Payload:
    """Unpickling this creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return (os.mkdir, (str(self.path),))


def test_a_pickled_payload_is_not_executed(saved: Path, tmp_path: Path) -> None:
    trap = tmp_path / "executed"
    payload = pickle.dumps(Payload(trap))
    for name in (".metadata", "__0_0.distcp", "model.pt"):
        (saved / name).write_bytes(payload)
    model, stepper = a_model(a_run(), seed=2)
    checkpoint.load(saved, model, stepper.updates, Axes())
    assert not trap.exists()
    shard(saved).write_bytes(payload)
    with pytest.raises(CheckpointError):
        checkpoint.load(saved, model, stepper.updates, Axes())
    assert not trap.exists()
    pickle.loads(payload)
    assert trap.exists(), "the payload is a real one"


def test_latest_ignores_what_is_not_complete(saved: Path) -> None:
    (saved.parent / ".writing-step-00000009").mkdir()
    (saved.parent / ".deleting-step-00000008").mkdir()
    assert checkpoint.latest(saved.parents[1]) == saved
    assert checkpoint.latest(saved) is None
