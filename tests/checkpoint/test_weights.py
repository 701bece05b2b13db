"""Weights of other runs: which a new run may begin with, and the mean of several checkpoints."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gridformer.checkpoint import checkpoint, find, weights, whole
from gridformer.checkpoint.checkpoint import check_same_run
from gridformer.checkpoint.manifest import Manifest, read_manifest
from gridformer.checkpoint.whole import average_run
from gridformer.evaluate import loading
from gridformer.mesh import Axes
from gridformer.models import Model
from gridformer.utils.errors import CheckpointError, ConfigError, UserError
from tests.support.checkpoints import built, save_model, small_run


def saved(out: Path, init_from: str | None = None, **model: Any) -> Model:
    """Save a model of seed 1 as a run would, and return it."""
    run = small_run(model=model, init_from=init_from)
    save_model(out, run)
    return built(run, 1)


def begun(
    out: Path, model: dict[str, Any], **train: Any
) -> tuple[weights.InitialWeights, Model, Model]:
    """Begin a run of seed 2 with saved weights; also return the model as it would be without."""
    run = small_run(model=model, init_from=str(out), **train)
    start = weights.start_of(run)
    assert start is not None
    made = built(run, 2)
    weights.load_initial_weights(start, made, Axes())
    return start, made, built(run, 2)


def test_all_weights_are_taken(tmp_path: Path) -> None:
    assert weights.start_of(small_run()) is None
    source = saved(tmp_path)
    start, made, _ = begun(tmp_path, {"dropout": 0.5})
    assert (start.rows, start.fresh) == ({}, ())
    for (name, got), want in zip(made.named_parameters(), source.parameters()):
        assert torch.equal(got, want), name


@pytest.mark.parametrize(("there", "here"), [(11, 14), (14, 11)])
def test_tables_of_another_size_are_resized_by_rule(tmp_path: Path, there: int, here: int) -> None:
    """Rows that both have are taken; further ones are those of a random start."""
    source = saved(tmp_path, vocab_size=there, max_seq_len=there - 7)
    sizes = {"vocab_size": here, "max_seq_len": here - 7}
    with pytest.raises(ConfigError) as refused:
        begun(tmp_path, sizes)
    assert len(refused.value.problems) == 2
    assert f"tokens.weight has {there} rows there and {here} here" in str(refused.value)
    assert "train.init_embeddings=resize" in str(refused.value)
    start, made, random = begun(tmp_path, sizes, init_embeddings="resize")
    assert start.rows == {"tokens.weight": (there, here), "positions.weight": (there - 7, here - 7)}
    assert f"tokens.weight from {there} to {here} rows" in start.describe()
    for name, got in made.named_parameters():
        want, n = source.get_parameter(name), min(len(got), len(source.get_parameter(name)))
        assert torch.equal(got[:n], want[:n]), name
        assert torch.equal(got[n:], random.get_parameter(name)[n:]), name


def test_new_heads_get_their_initial_values_as_a_whole(tmp_path: Path) -> None:
    source = saved(tmp_path, n_labels=3)
    start, made, random = begun(tmp_path, {"n_labels": 4})
    heads = [name for name, _ in made.named_parameters() if name.startswith("classifier.")]
    assert len(heads) == 4
    assert list(start.fresh) == heads
    for name, got in made.named_parameters():
        want = random if name in heads else source
        assert torch.equal(got, want.get_parameter(name)), name
    start, made, _ = begun(tmp_path, {"n_labels": 3})
    assert torch.equal(made.get_parameter(heads[0]), source.get_parameter(heads[0])), (
        "the same head is taken"
    )
    begun(tmp_path, {})  # a head that is not wanted is left out


@pytest.mark.parametrize(
    ("model", "want"),
    [
        ({"n_heads": 4}, "model.n_heads is 4, there 2: use model.n_heads=2"),
        ({"n_layers": 2}, "model.n_layers is 2, there 1"),
        ({"norm_eps": 1e-6}, "model.norm_eps is 1e-06, there 1e-05"),
        ({"family": "bert"}, "it is a gpt2, and model.family is bert"),
    ],
    ids=str,
)
def test_weights_of_another_model_are_refused(
    tmp_path: Path, model: dict[str, Any], want: str
) -> None:
    saved(tmp_path)
    with pytest.raises(ConfigError, match=r"^train\.init_from=") as refused:
        begun(tmp_path, model)
    assert want in str(refused.value)


def test_a_run_resumes_only_with_what_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is named otherwise is the same."""
    saved(tmp_path / "first")
    saved(tmp_path / "second", str(tmp_path / "first"))
    monkeypatch.chdir(tmp_path)
    for out, same, other in (("first", None, "other"), ("second", "first", "second")):
        folder = find.newest(tmp_path / out)
        check_same_run(read_manifest(folder), small_run(init_from=same), folder)
        with pytest.raises(CheckpointError, match=rf"train.init_from is {other}, there "):
            check_same_run(read_manifest(folder), small_run(init_from=other), folder)


def test_what_is_no_run_directory_is_refused_with_a_command_to_copy(tmp_path: Path) -> None:
    folder = tmp_path / "my run"
    folder.mkdir()
    with pytest.raises(CheckpointError, match=r"has no checkpoint: train first.*'/.*/my run'`"):
        begun(folder, {})
    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"gridformer import '/.*/my run' --out"):
        find.newest(folder)


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
    loaded = built(RUN, 4)
    manifest = checkpoint.load(find.newest(tmp_path / "mean"), loaded, None, Axes())
    assert (manifest.step, manifest.tokens, manifest.weights_only) == (3, 24, True)
    averaged = [built(RUN, step) for step in steps]
    for mean, *some in zip(*(m.parameters() for m in (loaded, *averaged))):
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
        manifest = verify(folder, contents)
        if folder == folders[2]:
            shutil.rmtree(folder)
        return manifest

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
