"""A folder is written completely or not at all, and what it replaces stays until then."""

from __future__ import annotations

from pathlib import Path

import pytest

from gridformer.utils.folders import (
    begin_folder,
    finish_folder,
    hidden_folder,
    remove_folder,
    remove_leftovers,
)


def write(target: Path, text: str) -> Path:
    writing = hidden_folder(target)
    begin_folder(writing)
    (writing / "file").write_text(text)
    return writing


def test_a_folder_gets_its_name_once_complete(tmp_path: Path) -> None:
    target = tmp_path / "new" / "folder"
    writing = write(target, "one")
    assert not target.exists()
    finish_folder(writing, target)
    assert (target / "file").read_text() == "one"
    (hidden_folder(target) / "leftover").mkdir(parents=True)
    finish_folder(write(target, "two"), target)
    assert (target / "file").read_text() == "two"
    assert [path.name for path in target.iterdir()] == ["file"]
    assert [path.name for path in target.parent.iterdir()] == ["folder"]


def test_what_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, rename = tmp_path / "folder", Path.rename
    finish_folder(write(target, "old"), target)
    writing = write(target, "new")

    def fails_for_new(path: Path, to: Path) -> Path:
        if path == writing:
            raise OSError("no")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", fails_for_new)
    with pytest.raises(OSError, match="no"):
        finish_folder(writing, target)
    assert (target / "file").read_text() == "old"


def test_removed_folders_leave_nothing(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    finish_folder(write(target, "old"), target)
    (tmp_path / ".deleting-other").mkdir()
    remove_folder(target)
    remove_leftovers(tmp_path)
    assert not [*tmp_path.iterdir()]
