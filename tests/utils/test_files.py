"""Files that a user names: what cannot be written is refused before the work."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gridformer.cli.app import app
from gridformer.utils.errors import UserError
from gridformer.utils.files import check_output


def test_a_file_in_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    check_output("--out", tmp_path / "a" / "b" / "new.yaml")
    (tmp_path / "a" / "b" / "new.yaml").write_text("")  # as the command would


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (".", "is a folder; name a file in it"),
        ("pipe", "is a pipe; name a file"),
        ("/dev/full", "is a device; name a file"),
        ("file/below", "the folder file cannot be made"),
        ("x" * 300 + "/y", "cannot be made (File name too long)"),
    ],
)
def test_what_could_not_be_written(
    path: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("file").write_text("kept")
    with pytest.raises(UserError) as refused:
        check_output("--emit", Path(path))
    assert str(refused.value).startswith(f"--emit {path}: ")
    assert says in str(refused.value)
    assert Path("file").read_text() == "kept"


@pytest.mark.parametrize(
    "words",
    [
        "calibrate --out /dev/full",
        "plan demo-4m --cluster dgx-h100 --devices 2 --emit /dev/full",
        "plan demo-4m --cluster dgx-h100 --devices 2 --html /dev/full",
        "memory demo-4m --html /dev/full",
    ],
)
def test_commands_look_at_it_first(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for work in (
        "gridformer.calibrate.machine.calibrate",
        "gridformer.plan.search.search",
        "gridformer.memory.estimate.estimate_ranks",
    ):
        monkeypatch.setattr(work, lambda *_, **__: pytest.fail("the work has begun"))
    done = CliRunner().invoke(app, words.split())
    assert isinstance(done.exception, UserError), done.output
    assert "/dev/full: is a device" in str(done.exception)
