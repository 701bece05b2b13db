"""Folders are written completely or not at all; those of killed processes are removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gridformer.utils.files import (
    begin_folder,
    finish_folder,
    hidden_folder,
    remove_folder,
    remove_leftovers,
    remove_private_leftovers,
)
from tests.support.launch.programs import ROOT


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


# `warm_up` would let the server load torch, which takes seconds.
STARTS = """
import multiprocessing.forkserver
from gridformer.launch import processes
processes.PRELOAD.clear()
processes.warm_up()
print(flush=True)
input()
"""


def started(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", STARTS],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "\n"
    return process


def test_a_killed_process_leaves_a_folder_that_the_next_run_removes() -> None:
    with tempfile.TemporaryDirectory(prefix="t-") as short:
        folder = Path(short)
        ended, killed = started(folder), started(folder)
        names = [path.name for path in folder.iterdir()]
        assert len(names) == 2, names
        remove_private_leftovers(folder)
        assert len([*folder.iterdir()]) == 2, "their processes run"
        ended.communicate("\n")
        assert len([*folder.iterdir()]) == 1
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        assert len([*folder.iterdir()]) == 1
        remove_private_leftovers(folder)
        assert not [*folder.iterdir()]


def test_sockets_are_in_tmp_where_the_path_of_a_folder_is_too_long() -> None:
    with tempfile.TemporaryDirectory(prefix="t-") as short:
        long = Path(short) / ("x" * 90)
        long.mkdir()
        process = started(long)
        assert not [*long.iterdir()]
        (folder,) = Path("/tmp").glob(f"gridformer-{process.pid}.*")
        process.send_signal(signal.SIGKILL)
        process.communicate()
        remove_private_leftovers()
        assert not folder.exists()
