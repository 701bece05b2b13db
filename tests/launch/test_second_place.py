"""`train.checkpoint_to`: what a run does about it before its processes start and after they end."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from gridformer.checkpoint.store import RemoteStore, step_of
from gridformer.launch import run as runner
from gridformer.launch.plan import plan_run
from gridformer.launch.run import execute
from gridformer.launch.run_lock import RunLock
from gridformer.utils.errors import CheckpointError, ConfigError
from tests.support.checkpoints import flip_a_bit


@pytest.fixture
def run_file(token_folder: Path, tmp_path: Path) -> Path:
    sections: dict[str, Any] = {
        "model": {"family": "gpt2", "n_layers": 1, "hidden_size": 8, "n_heads": 2},
        "data": {"path": str(token_folder), "seq_len": 8},
        "layout": {"scheme": "single"},
        "train": {
            "steps": 4, "global_batch": 2, "save_every": 2, "eval_every": 0, "eval_batches": 1,
            "loggers": [], "device": "cpu", "checkpoint_to": f"file://{tmp_path}/far",
            "full_disk_wait_s": 0,
        },
    }  # fmt: skip
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(sections))
    return file


def test_a_place_inside_the_run_directory_is_refused(run_file: Path, tmp_path: Path) -> None:
    """Each copy would remove the checkpoint itself."""
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="is where the run itself writes"):
        plan_run(run_file, [f"train.checkpoint_to={out}/checkpoints"], out=out)
    assert plan_run(run_file, out=out).resume is None


def train(file: Path, out: Path, *overrides: str) -> None:
    """Train as the command line does."""
    with RunLock() as lock:
        execute(plan_run(file, [*overrides], out=out, lock=lock))


def far(tmp_path: Path) -> list[int]:
    """Return the steps of the copies."""
    return [step_of(name) for name in RemoteStore(f"file://{tmp_path}/far").complete()]


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Checkpoints of the steps in this set cannot be copied."""
    steps: set[int] = set()
    upload = RemoteStore.upload

    def breaks(self: RemoteStore, folder: Path) -> None:
        if step_of(folder.name) in steps:
            raise PermissionError("no credentials")
        upload(self, folder)

    monkeypatch.setattr(RemoteStore, "upload", breaks)
    return steps


def test_a_run_whose_last_checkpoint_is_not_copied_does_not_end_well(
    run_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], broken: set[int]
) -> None:
    out = tmp_path / "out"
    broken.add(4)
    for _ in range(2):  # the second finds that the run is done
        with pytest.raises(SystemExit) as ended:
            train(run_file, out)
        assert ended.value.code == 1
        *_, last = capfd.readouterr().err.splitlines()
        assert last == (
            f"gridformer: all steps are done and their checkpoint is in {out}, but it is not at "
            f"file://{tmp_path}/far (PermissionError: no credentials): run the same command to "
            "copy it"
        )
        assert far(tmp_path) == [2]
    assert (out / "loss.png").exists(), "nothing else is missing"
    broken.clear()
    train(run_file, out)
    assert "has done 4 of 4 steps: increase" in capfd.readouterr().out
    train(run_file, out, "train.steps=3")
    assert "has done 4 steps, more than train.steps=3: increase" in capfd.readouterr().out
    assert far(tmp_path) == [2, 4]


def test_the_copy_of_the_last_checkpoint_is_tried_again(
    run_file: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    broken: set[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 6:
            broken.clear()

    clock = SimpleNamespace(monotonic=lambda: sum(pauses), time=lambda: 0.0, sleep=sleep)
    monkeypatch.setattr(runner, "time", clock)
    broken.add(4)
    train(run_file, tmp_path / "out", "train.full_disk_wait_s=900")
    assert pauses == [5, 10, 20, 40, 60, 60]
    assert capfd.readouterr().err.count("trying again for 900 s (train.full_disk_wait_s)") == 1
    assert far(tmp_path) == [2, 4]


def test_a_run_that_was_killed_while_it_copied_copies_when_it_is_started_again(
    run_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], broken: set[int]
) -> None:
    out = tmp_path / "out"
    train(run_file, out, "train.steps=3")
    for step in (2, 3):
        shutil.rmtree(tmp_path / f"far/step-{step:08d}")
    train(run_file, out, "train.steps=3")
    assert far(tmp_path) == [3], "the run is done"
    shutil.rmtree(tmp_path / "far/step-00000003")
    train(run_file, out)
    assert far(tmp_path) == [3, 4]
    shutil.rmtree(tmp_path / "far/step-00000004")
    broken.add(4)
    train(run_file, out, "train.steps=6", "train.save_every=3")
    assert far(tmp_path) == [3, 6], "a copy that is only late stops no run"
    said = capfd.readouterr().err
    assert f"not at file://{tmp_path}/far (PermissionError: no credentials): the next save" in said


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


@pytest.mark.parametrize("damage", [flip_a_bit, truncate])
def test_an_intact_copy_takes_the_place_of_a_damaged_checkpoint(
    run_file: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
) -> None:
    out = tmp_path / "out"
    train(run_file, out)
    newest, copy = out / "checkpoints/step-00000004", f"file://{tmp_path}/far/step-00000004"
    damage(newest / "shard-00001.safetensors")
    with pytest.raises(CheckpointError) as refused:
        train(run_file, out, "train.steps=6")
    assert str(refused.value).endswith(
        f"{copy} is a copy: train.fallback=true verifies it, resumes from it and keeps the damaged "
        f"one aside, as does moving {newest} elsewhere"
    )
    capfd.readouterr()
    moved = tmp_path / "moved"
    shutil.copytree(out, moved)
    shutil.rmtree(moved / "checkpoints/step-00000004")
    train(run_file, out, "train.steps=6", "train.fallback=true")
    said = capfd.readouterr()
    assert f"resuming after step 4 from {newest}" in said.out
    (line,) = [line for line in said.err.splitlines() if "resuming from" in line]
    aside = out / "checkpoints/damaged-step-00000004"
    assert line.endswith(
        f"; resuming from its copy {copy}, as train.fallback=true says, and keeping the damaged "
        f"one as {aside}"
    )
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == [aside.name, *(f"step-{step:08d}" for step in (2, 4, 6))]
    plan = plan_run(run_file, out=moved, lock=(lock := RunLock()))
    lock.__exit__(None, None, None)
    assert plan.resume_step == 6, "as the error says of moving it"


def test_a_copy_that_is_damaged_too_or_older_is_not_used(
    run_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    train(run_file, out)
    name = "step-00000004/shard-00001.safetensors"
    for folder in (out / "checkpoints", tmp_path / "far"):
        flip_a_bit(folder / name)
    train(run_file, out, "train.steps=5", "train.fallback=true")
    said = capfd.readouterr()
    assert f"file://{tmp_path}/far/{name} is damaged (its checksum is wrong)" in said.err
    assert "this copy cannot replace" in said.err
    assert f"resuming after step 2 from {out}/checkpoints/step-00000002" in said.out
    assert "resuming from its copy" not in said.err
    flip_a_bit(out / "checkpoints/step-00000005/shard-00001.safetensors")
    RemoteStore(f"file://{tmp_path}/far").remove("step-00000005")
    with pytest.raises(CheckpointError, match="=true resumes from the checkpoint before it"):
        train(run_file, out, "train.steps=6")
