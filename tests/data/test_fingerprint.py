"""Fingerprints of token folders: what changes them, and that a moved folder keeps its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from gridformer.data.fingerprint import _BLOCK_BYTES, _BLOCKS, _hash, fingerprint
from gridformer.data.tokenfolder import INDEX, TOKENIZER, TokenFolder


@pytest.fixture
def folder(token_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(token_folder, tmp_path / "moved"))


def test_a_moved_folder_has_the_same(token_folder: Path, folder: Path) -> None:
    first, moved = (fingerprint(TokenFolder.open(path)) for path in (token_folder, folder))
    assert first == moved
    assert first.differences(moved) == []


@pytest.mark.parametrize("name", ["train.bin", "val.bin", TOKENIZER])
def test_a_changed_file_is_named(token_folder: Path, folder: Path, name: str) -> None:
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    there, here = (fingerprint(TokenFolder.open(path)) for path in (token_folder, folder))
    assert here.differences(there) == [f"the contents of {name} changed"]


def test_a_changed_index_is_named(token_folder: Path, folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["eos_id"] += 1
    (folder / INDEX).write_text(json.dumps(index))
    there, here = (fingerprint(TokenFolder.open(path)) for path in (token_folder, folder))
    eos = index["eos_id"]
    assert here.differences(there) == [f"end of text is {eos}, there {eos - 1}"]


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
