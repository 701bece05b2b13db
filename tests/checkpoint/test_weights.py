"""Which weights a new run may begin with, and what becomes of heads and tables of other sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gridformer.checkpoint import find, weights
from gridformer.checkpoint.checkpoint import check_same_run
from gridformer.checkpoint.manifest import read_manifest
from gridformer.mesh import Axes
from gridformer.models import Model
from gridformer.utils.errors import CheckpointError, ConfigError
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
    source = saved(tmp_path)
    start, made, _ = begun(tmp_path, {"dropout": 0.5})
    assert (start.rows, start.fresh) == ({}, ())
    for (name, got), want in zip(made.named_parameters(), source.parameters()):
        assert torch.equal(got, want), name


def test_runs_begin_with_random_weights_by_default() -> None:
    assert weights.start_of(small_run()) is None


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
