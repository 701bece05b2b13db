"""Each checkpoint has the small files of its model with it, so that it can be used anywhere."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gridformer.checkpoint.convert.exporting import export_run
from gridformer.checkpoint.convert.importing import import_folder
from gridformer.checkpoint.manifest import KEPT, MANIFEST, read_manifest, verify_checkpoint
from gridformer.checkpoint.side_files import load_tokenizer, root_of
from gridformer.checkpoint.whole import average_run
from gridformer.data import TokenFolder, Tokenizer
from gridformer.data.run_data import fingerprint
from gridformer.data.side_texts import write_label_names
from gridformer.evaluate.loading import load_model
from gridformer.utils.errors import CheckpointError, DataError
from gridformer.utils.files import regular_bytes
from tests.support.checkpoints import flip_a_bit, save_model, small_run
from tests.support.data import sentences

CPU = torch.device("cpu")
SMALL = {"config.json": b"{}", "merges.txt": b"a b\n"}  # of an imported model


def save(out: Path, tokens: Path, step: int = 1) -> Path:
    """Save a checkpoint of an untrained model into a run directory."""
    run = small_run(tokens, {"max_seq_len": 8, "vocab_size": 301})
    return save_model(out, run, step, step, data=fingerprint(TokenFolder.open(tokens)))


@pytest.fixture
def run_dir(token_folder: Path, tmp_path: Path) -> Path:
    """Return a run directory as a run begins it, without a checkpoint."""
    out = tmp_path / "run"
    (out / KEPT).mkdir(parents=True)
    shutil.copy(token_folder / "tokenizer.json", out)
    write_label_names(out, ["no", "yes"])
    for name, content in SMALL.items():
        (out / KEPT / name).write_bytes(content)
    for other in ("metrics.jsonl", f"{KEPT}/a model of 9 GB"):
        (out / other).write_text("which is no side file")
    return out


@pytest.fixture
def folder(run_dir: Path, token_folder: Path) -> Path:
    return save(run_dir, token_folder)


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files in a folder but shards and manifest."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".safetensors" and path.name != MANIFEST
    }


def expected(run_dir: Path) -> dict[str, bytes]:
    names = ("tokenizer.json", "labels.json", *(f"{KEPT}/{name}" for name in SMALL))
    return {name: (run_dir / name).read_bytes() for name in names}


def test_a_checkpoint_is_used_far_from_its_run(
    folder: Path, run_dir: Path, token_folder: Path, tmp_path: Path
) -> None:
    assert files_of(folder) == expected(run_dir)
    assert {*read_manifest(folder).side_files} == {*files_of(folder)}
    far = tmp_path / "elsewhere" / "checkpoints" / folder.name
    shutil.copytree(folder, far)
    Tokenizer.train(sentences(50), 270).save(far.parents[1] / "tokenizer.json")
    trained = load_model(far, CPU)
    want = Tokenizer.load(token_folder / "tokenizer.json").vocabulary
    assert trained.tokenizer.vocabulary == want, "its own is preferred to another one"


def test_averages_and_imports_have_them_too(
    run_dir: Path, token_folder: Path, tmp_path: Path
) -> None:
    for step in (1, 2):
        save(run_dir, token_folder, step)
    average_run(run_dir, tmp_path / "mean", 2)
    mean = tmp_path / "mean" / "checkpoints" / "step-00000002"
    assert files_of(mean) == expected(run_dir)
    verify_checkpoint(mean)
    shutil.rmtree(run_dir / KEPT)  # whose config.json is none
    save(run_dir, token_folder, 3)
    export_run(run_dir, tmp_path / "theirs")
    import_folder(tmp_path / "theirs", tmp_path / "back")
    back = tmp_path / "back" / "checkpoints" / "step-00000000"
    assert verify_checkpoint(back).side_files.keys() >= {"tokenizer.json", f"{KEPT}/config.json"}
    alone = shutil.copytree(back, tmp_path / "alone")
    shutil.rmtree(tmp_path / "back")
    export_run(alone, tmp_path / "again")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        got, want = (tmp_path / one / name for one in ("again", "theirs"))
        assert json.loads(got.read_text()) == json.loads(want.read_text())


def with_side_files(folder: Path, side_files: dict[str, Any]) -> None:
    """Let the manifest of a checkpoint name these side files."""
    content = json.loads((folder / MANIFEST).read_text())
    del content["checksum"]
    (folder / MANIFEST).write_text(json.dumps({**content, "side_files": side_files}))


def earlier(folder: Path) -> None:
    """Turn a checkpoint into one of an earlier version, which has no side files."""
    for name in read_manifest(folder).side_files:
        (folder / name).unlink()
    with_side_files(folder, {})


def test_only_a_run_directory_helps_checkpoints_of_earlier_versions(
    folder: Path, run_dir: Path, token_folder: Path, tmp_path: Path
) -> None:
    earlier(folder)
    assert root_of(folder) == run_dir
    assert load_model(folder, CPU).tokenizer.vocab_size == 301
    link = tmp_path / "best"
    link.symlink_to(folder)
    assert load_model(link, CPU).tokenizer.vocab_size == 301
    far = Path(shutil.copytree(folder, tmp_path / "models" / folder.name))
    for parent in (far.parent, tmp_path):
        shutil.copy(token_folder / "tokenizer.json", parent)  # of nobody knows what
    with pytest.raises(DataError) as error:
        load_model(far, CPU)
    assert str(error.value).startswith(f"{far} has no tokenizer.json, which generation and")
    shutil.copy(token_folder / "tokenizer.json", far)
    assert load_model(far, CPU).tokenizer.vocab_size == 301


@pytest.mark.parametrize("size", [270, 310])
def test_a_tokenizer_of_another_model_is_refused(
    folder: Path, run_dir: Path, tmp_path: Path, size: int
) -> None:
    earlier(folder)
    shutil.rmtree(run_dir / KEPT)  # with which the tokenizer of an import would be exported
    file = run_dir / "tokenizer.json"
    Tokenizer.train(sentences(200), size).save(file)
    said = f"it has {size} tokens, and that of training had 301: replace it by the one of the model"
    for use in (load_model, lambda folder, _: export_run(folder, tmp_path / "theirs")):
        with pytest.raises(DataError) as error:
            use(folder, CPU)
        assert str(error.value) == f"{file} is that of another model than {folder}, as {said}"
    manifest = read_manifest(folder).model_copy(update={"data": None})  # as of an import
    if size < 301:
        assert load_tokenizer(folder, manifest).vocab_size == size
        return
    with pytest.raises(DataError, match="it has the token 309, and the model only 301: replace"):
        load_tokenizer(folder, manifest)


def linked(path: Path) -> None:
    path.rename(path.with_name("real"))
    path.symlink_to(path.with_name("real"))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda folder: flip_a_bit(folder / "tokenizer.json"), "its checksum is wrong"),
        (lambda folder: os.truncate(folder / KEPT / "merges.txt", 1), "it has 1 bytes, but 4"),
        (lambda folder: (folder / "labels.json").unlink(), "labels.json is missing"),
        (lambda folder: linked(folder / "labels.json"), "is a symbolic link"),
        (lambda folder: linked(folder / KEPT), "is a symbolic link"),
    ],
)
def test_damage_is_found(folder: Path, damage: Any, told: str) -> None:
    assert verify_checkpoint(folder, part=1, n_parts=2) == verify_checkpoint(folder)
    damage(folder)
    with pytest.raises(CheckpointError, match=told):
        verify_checkpoint(folder)


@pytest.mark.parametrize("name", ["../tokenizer.json", "/etc/passwd", "a/b", f"{KEPT}/../x", ""])
def test_no_file_outside_a_checkpoint_is_read(folder: Path, name: str) -> None:
    with_side_files(folder, {name: {"bytes": 1, "crc32": 1}})
    with pytest.raises(CheckpointError, match="is not the name of a small file in its folder"):
        verify_checkpoint(folder)


def test_a_file_that_cannot_be_read_costs_no_checkpoint(
    run_dir: Path, token_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(path: Path, at_most: int) -> bytes:
        if path.name == "labels.json":
            raise PermissionError(13, "Permission denied")
        return regular_bytes(path, at_most)

    with monkeypatch.context() as patch:
        patch.setattr("gridformer.checkpoint.side_files.regular_bytes", refuses)
        folder = save(run_dir, token_folder)
    assert "labels.json" not in files_of(folder)
    verify_checkpoint(folder)
