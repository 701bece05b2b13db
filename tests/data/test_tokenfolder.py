"""Opening token folders, and the message for each way in which one can be damaged."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gridformer.data import TokenFolder, Tokenizer
from gridformer.data.indexed import HEADER_BYTES, write_index
from gridformer.data.prepare.corpus import prepare_corpus
from gridformer.utils.errors import DataError
from tests.support.data import listed, sentences
from tests.support.foreign import put, shorter, without


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("original") / "tokens"
    prepare_corpus([listed(*sentences(121))], out, vocab_size=300)
    return out


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "tokens"))


def change(folder: Path, **values: Any) -> None:
    raw = json.loads((folder / "index.json").read_text())
    for key, value in values.items():
        raw[key] = raw[key] | value if isinstance(value, dict) else value
    (folder / "index.json").write_text(json.dumps(raw))


def test_opened(folder: Path) -> None:
    tokens = TokenFolder.open(str(folder))
    assert isinstance(tokens.train.tokens, np.memmap)
    assert tokens.train.tokens.dtype == np.dtype("<u2")
    assert tokens.vocab_size == 300
    assert tokens.eos_id == tokens.tokenizer.eos_id
    assert tokens.train.n_documents + tokens.val.n_documents == 121
    assert tokens.val.document(0)[-1] == tokens.eos_id
    assert tokens.val.document(0).dtype == np.int64
    with pytest.raises(IndexError, match="has documents 0 to"):
        tokens.val.document(tokens.val.n_documents)
    with pytest.raises((ValueError, TypeError)):
        tokens.train.tokens[0] = 1


def test_what_is_no_token_folder(folder: Path) -> None:
    """Commands that a refusal names can be copied."""
    parent = folder.parent
    (parent / "tokensy").mkdir()
    (parent / "file").write_text("x")
    rows = [
        ("gone", f"gridformer prepare python-stdlib --out {parent / 'gone'}$"),
        ("my text", rf"--out '{parent}/my text'$"),
        ("tokensz", rf"tokensz: no such token folder \(did you mean '{folder}'\?\); write"),
        ("tokensy", r"has no index\.json; write one with gridformer prep"),
        ("file", r"has no index\.json; write one with gridformer prep"),
    ]
    for name, said in rows:
        with pytest.raises(DataError, match=said):
            TokenFolder.open(parent / name)
    for content in ("{}", "[]", '{"format": "webdataset"}'):
        (folder / "index.json").write_text(content)
        with pytest.raises(DataError, match="is not the index of a token folder"):
            TokenFolder.open(folder)


def _grow(folder: Path) -> None:
    with (folder / "val.bin").open("ab") as file:
        file.write(b"\0\0")


def _one_token_each(folder: Path) -> None:
    lengths = np.ones(TokenFolder.open(folder).val.n_documents, dtype=np.int64)
    write_index(folder / "val.idx", np.dtype("<u2"), lengths)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shorter("train.bin", 1), r"train\.bin: has \d+ bytes, expected \d+ \(\d+ tokens of u"),
        (shorter("val.bin", 2), r"val\.bin: has \d+ bytes, expected \d+"),
        (_grow, r"val\.bin: has \d+ bytes, expected \d+"),
        (shorter("train.idx", 8), r"train\.idx: has .* \(the index of \d+ documents\)"),
        (put("train.idx", 0, b"\x00"), r"train\.idx: is not an index of Megatron-LM"),
        (put("train.idx", 17, b"\x05"), r"documents of int64, but index\.json \d+ of uint16"),
        (shorter("tokenizer.json", 1), r"tokenizer\.json: has \d+ bytes, expected \d+"),
        (shorter("index.json", 5), r"index\.json: cannot be read"),
        (without("val.bin"), r"val\.bin: is missing"),
        (without("tokenizer.json"), r"tokenizer\.json: is missing"),
        (lambda f: change(f, dtype="int32"), "says int32, .* vocabulary of 300 .* as uint16"),
        (lambda f: change(f, vocab_size=70_000), "says uint16, .* of 70000 .* as int32"),
        (lambda f: change(f, eos_id=300), "end-of-text id 300 is outside the vocabulary of 300"),
        (lambda f: change(f, train={"tokens": 5}), r"gives train\.bin \d+ bytes, but 5 tok.* 10"),
        (lambda f: change(f, val={"documents": 1}), r"gives val\.idx .*, but the index of 1 .* 62"),
        (lambda f: change(f, kind="pairs"), "documents, which make no pairs"),
        (_one_token_each, r"val\.idx: runs from 0 to \d+, expected 0 to"),
        (put("val.idx", HEADER_BYTES, b"\x00"), r"val\.idx: sequence 0 .* and has \d+ tokens"),
        (lambda f: change(f, version=4), "version 4 of the format, but .* reads version 3"),
        (lambda f: change(f, version=2), "version 2 of the format, but .* reads version 3"),
        (lambda f: change(f, dtype="float32", eos_id=-1), r"is damaged \(dtype: .*; eos_id: "),
    ],
)
def test_damaged(folder: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(folder)
    with pytest.raises(DataError, match=message) as error:
        TokenFolder.open(folder).check()
    assert f"gridformer prepare SOURCE --out {folder} --overwrite" in str(error.value)


def test_tokenizer_of_another_folder(folder: Path) -> None:
    Tokenizer.train(sentences(50), 270).save(folder / "tokenizer.json")
    change(folder, tokenizer={"bytes": (folder / "tokenizer.json").stat().st_size})
    with pytest.raises(DataError, match=r"has vocabulary .* \(270, 0\), but .* says \(300, 0\)"):
        _ = TokenFolder.open(folder).tokenizer


def test_labels_must_fit(labeled_folder: TokenFolder, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(labeled_folder.path, tmp_path / "t"))
    change(folder, labels=["one"])
    with pytest.raises(DataError, match=r"labels\.bin: has labels 0 to 9, but .* names 1"):
        TokenFolder.open(folder)
    shorter("val.labels.bin", 4)(folder)
    change(folder, labels=list("abcdefghij"))
    with pytest.raises(DataError, match=r"val\.labels\.bin: has \d+ bytes, expected \d+ \(\d+ int"):
        TokenFolder.open(folder)
