"""`gridformer average` writes the mean of the last checkpoints, which loads as any other."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from gridformer.checkpoint import checkpoint, find, whole
from gridformer.checkpoint.manifest import Manifest, read_manifest
from gridformer.checkpoint.whole import average_run
from gridformer.evaluate import loading
from gridformer.mesh import Axes
from gridformer.utils.errors import CheckpointError, ConfigError, UserError
from tests.support.checkpoints import built, save_model, small_run

RUN = small_run(keep_checkpoints=9)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return a run whose checkpoint of step i has the initial weights of seed i."""
    for step in (1, 2, 3):
        save_model(tmp_path / "run", RUN, step, seed=step)
    for name in ("tokenizer.json", "labels.json"):
        (tmp_path / "run" / name).write_text("kept", encoding="utf-8")
    return tmp_path / "run"


@pytest.mark.parametrize("steps", [(2, 3), (1, 2, 3)])
def test_the_mean_of_the_last_checkpoints(
    steps: tuple[int, ...], run_dir: Path, tmp_path: Path
) -> None:
    assert average_run(run_dir, tmp_path / "mean", len(steps)) == steps
    for name in ("tokenizer.json", "labels.json"):
        assert (tmp_path / "mean" / name).read_text(encoding="utf-8") == "kept"
    found = built(RUN, 4)
    manifest = checkpoint.load(find.newest(tmp_path / "mean"), found, None, Axes())
    assert (manifest.step, manifest.tokens, manifest.weights_only) == (3, 24, True)
    averaged = [built(RUN, step) for step in steps]
    for mean, *some in zip(*(m.parameters() for m in (found, *averaged))):
        assert torch.equal(mean, (sum(one.double() for one in some) / len(some)).float())
    assert not read_manifest(find.newest(run_dir)).weights_only


def test_a_run_removes_a_checkpoint_while_it_is_read(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever needs one takes the next one; an average, and a layout's processes, say so."""
    folders, verify = find.complete(run_dir), whole.verify_checkpoint
    monkeypatch.setattr(loading, "load_tokenizer", lambda folder, manifest: (folder / "x").touch())
    gone = f"{folders[2]} is no longer there: a run that goes on keeps only its newest checkpoints"

    def then_removed(folder: Path, contents: bool = True) -> Manifest:
        found = verify(folder, contents)
        if folder == folders[2]:
            shutil.rmtree(folder)
        return found

    shutil.copytree(run_dir, tmp_path / "copy")
    monkeypatch.setattr(loading, "verify_checkpoint", then_removed)
    assert loading.load_for_inference(run_dir)[1] == folders[1]
    with pytest.raises(CheckpointError, match=gone):
        loading.load_for_inference(folders[2])
    shutil.rmtree(run_dir)
    shutil.copytree(tmp_path / "copy", run_dir)
    monkeypatch.setattr(whole, "verify_checkpoint", then_removed)
    with pytest.raises(CheckpointError, match=gone):
        average_run(run_dir, tmp_path / "mean", 2)


def test_what_cannot_be_averaged_is_refused(run_dir: Path, tmp_path: Path) -> None:
    for last, remedy in ((1, "use --last 2 or more"), (5, "use --last 3, or train with train.k")):
        with pytest.raises(ConfigError, match=remedy):
            average_run(run_dir, tmp_path / "mean", last)
    with pytest.raises(ConfigError, match="has no checkpoints, and an average needs"):
        average_run(tmp_path, tmp_path / "mean", 2)
    with pytest.raises(UserError, match="already"):
        average_run(run_dir, run_dir, 2)
    assert not (tmp_path / "mean").exists()
