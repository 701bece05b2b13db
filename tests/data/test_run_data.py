"""The folders of a run: mixtures of equal tokenizers, those that differ, and fingerprints."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gridformer.config import RunConfig, parse_run
from gridformer.data import RunData, TokenFolder, open_training, open_validation, resolve
from gridformer.data.prepare.corpus import prepare_corpus
from gridformer.data.run_data import _BLOCK_BYTES, _BLOCKS, _hash, fingerprint
from gridformer.data.samples.batches import remarks
from gridformer.data.tokenfolder import INDEX, TOKENIZER
from gridformer.train.console import set_losses
from gridformer.utils.errors import ConfigError
from tests.support.data import labeled_source, listed, sentences

MODEL = {"n_layers": 1, "hidden_size": 8, "n_heads": 2, "max_seq_len": 16}


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory, text_folder: TokenFolder) -> TokenFolder:
    """Return a folder in capitals with the tokenizer of `text_folder`."""
    out = tmp_path_factory.mktemp("second") / "capitals"
    texts = [text.upper() for text in sentences(80)]
    tokenizer = text_folder.tokenizer
    return prepare_corpus([listed(*texts)], out, tokenizer=tokenizer, val_fraction=0.2)


def a_mixture(
    *sources: tuple[str, TokenFolder, float], family: str = "gpt2", **values: Any
) -> RunConfig:
    listed = [{"name": n, "path": str(one.path), "weight": w} for n, one, w in sources]
    data = {"sources": listed, **values.pop("data", {})}
    model = {"family": family, **MODEL, **values.pop("model", {})}
    return parse_run({"model": model, "data": data, "train": {"global_batch": 10, **values}})


def resolved(run: RunConfig) -> tuple[RunConfig, RunData]:
    data = RunData.open(run.data)
    return resolve(run, data), data


def test_a_restarted_order_keeps_the_steps_of_stages(
    text_folder: TokenFolder, second: TokenFolder
) -> None:
    """The order begins at the fourth step (number 3 from 0), the stage at step 6 for users."""
    stages = [{"from_step": 6, "weights": {"b": 1}}]
    run, data = resolved(
        a_mixture(("a", text_folder, 1), ("b", second, 1), data={"stages": stages})
    )

    later = open_training(run, data, start=3)
    one = open_training(*resolved(a_mixture(("a", text_folder, 1), ("b", second, 1))))
    only_b = open_training(*resolved(a_mixture(("b", second, 1))))
    assert np.array_equal(later.batch(4)["tokens"], one.batch(1)["tokens"])
    # Half of two batches of 10 were b's.
    begun = np.concatenate([only_b.batch(n)["tokens"] for n in (1, 2)])
    assert np.array_equal(later.batch(5)["tokens"], begun[:10])
    n_a, n_b = ((data.sources[name].train.n_tokens - 1) // 16 for name in ("a", "b"))
    assert remarks(later) == [
        f"a mixture of 50.0% a ({n_a} samples), 50.0% b ({n_b} samples)",
        "from step 6 on 0.0% a, 100.0% b",
    ]
    past = open_training(run, data, start=9)
    assert np.array_equal(past.batch(9)["tokens"], only_b.batch(0)["tokens"])


def test_validation_sets_are_splits_of_named_folders(
    text_folder: TokenFolder, second: TokenFolder
) -> None:
    sets = [{"name": "b"}, {"name": "seen", "path": str(text_folder.path), "split": "train"}]
    run, data = resolved(
        a_mixture(("a", text_folder, 1), ("b", second, 1), data={"validation": sets})
    )
    assert data.validation == {"b": data.sources["b"].val, "seen": data.sources["a"].train}
    batches = open_validation(run, data)
    assert [*batches] == ["b", "seen"]
    metrics = {"val_loss": 2.5, "val_loss_b": 2.0, "val_loss_seen": 3.0, "val_loss_tokens": 2.1}
    assert set_losses(run, metrics) == "b 2.000, seen 3.000"
    assert batches["seen"].n_samples > batches["b"].n_samples


def test_folders_that_do_not_fit_are_named(
    text_folder: TokenFolder, labeled_folder: TokenFolder, pairs_folder: TokenFolder, tmp_path: Path
) -> None:
    def problems(run: RunConfig) -> str:
        with pytest.raises(ConfigError) as error:
            resolved(run)
        return str(error.value)

    mixed = a_mixture(("a", text_folder, 1), ("b", pairs_folder, 1))
    said = problems(mixed)
    assert f"data.sources.b={pairs_folder.path} contains pairs" in said
    assert f"b={pairs_folder.path} has another tokenizer than data.sources.a=" in said
    assert f"--tokenizer {text_folder.path} --out FOLDER" in said
    other = prepare_corpus(
        [labeled_source(20)], tmp_path / "l", tokenizer=labeled_folder.tokenizer, val_fraction=0.2
    )
    if other.index.labels != labeled_folder.index.labels:
        run = a_mixture(("a", labeled_folder, 1), ("b", other, 1), model={"n_labels": 10})
        assert f"data.sources.b={other.path} has the labels" in problems(run)


def test_fingerprints_name_the_source_that_changed(
    text_folder: TokenFolder, second: TokenFolder
) -> None:
    one, other = ("a", text_folder, 1.0), ("b", second, 1.0)
    there = fingerprint(RunData.open(a_mixture(one, other).data))
    swapped = fingerprint(RunData.open(a_mixture(one, ("b", text_folder, 1.0)).data))
    assert any(said.startswith("b: tokens of train is") for said in swapped.differences(there))
    renamed = fingerprint(RunData.open(a_mixture(one, ("c", second, 1.0)).data))
    assert renamed.differences(there) == ["it is read from a and c, there from a and b"]
    turned = fingerprint(RunData.open(a_mixture(other, one).data))
    assert turned.differences(there) == ["it is read from b and a, there from a and b"]
    sets = {"validation": [{"name": "b"}]}
    fewer = fingerprint(RunData.open(a_mixture(one, other, data=sets).data))
    assert fewer.differences(there) == [], "a validation set may come or go"
    moved = {"validation": [{"name": "b", "path": str(text_folder.path)}]}
    changed = fingerprint(RunData.open(a_mixture(one, other, data=moved).data))
    assert any(said.startswith("validation set b: ") for said in changed.differences(fewer))


@pytest.fixture
def folder(token_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(token_folder, tmp_path / "moved"))


@pytest.mark.parametrize("name", ["train.bin", "val.bin", TOKENIZER, INDEX])
def test_a_changed_file_is_named(token_folder: Path, folder: Path, name: str) -> None:
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    said = f"the contents of {name} changed"
    there = fingerprint(TokenFolder.open(token_folder))
    assert fingerprint(TokenFolder.open(folder)) == there, "it has moved"
    if name == INDEX:
        index = json.loads((folder / INDEX).read_text())
        index["eos_id"] += 1
        content = bytearray(json.dumps(index).encode())
        said = f"end of text is {index['eos_id']}, there {index['eos_id'] - 1}"
    (folder / name).write_bytes(content)
    assert fingerprint(TokenFolder.open(folder)).differences(there) == [said]


def test_of_a_large_file_blocks_are_read(tmp_path: Path) -> None:
    """The first, the last and some between, so the time does not grow with the file."""
    path, size = tmp_path / "train.bin", 10 * _BLOCKS * _BLOCK_BYTES
    with path.open("wb") as file:
        file.truncate(size)
    before = _hash(path)
    for at, changes in ((0, True), (_BLOCK_BYTES, False), (size - 1, True)):
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"\1")
            file.flush()
            assert (_hash(path) != before) == changes, at
            file.seek(at)
            file.write(b"\0")
    assert _hash(path) == before
