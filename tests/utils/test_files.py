"""Files that a user names: what cannot be written is refused before the work; full disks."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from gridformer.cli.app import app
from gridformer.config import configs_dir
from gridformer.utils.errors import UserError
from gridformer.utils.files import FullDiskError, check_output, is_full, writing
from tests.support.commands import gridformer_here


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


@pytest.mark.parametrize("inputs", [["no-such-name", "in.yaml"], ["", "linked.yaml"]])
def test_what_is_read_is_not_written(
    inputs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.yaml").write_text("kept")
    Path("linked.yaml").symlink_to("in.yaml")
    check_output("--emit", Path("out.yaml"), inputs)
    with pytest.raises(UserError, match=r"--emit in\.yaml: is an input of this command"):
        check_output("--emit", Path("./in.yaml"), inputs)


@pytest.mark.parametrize(
    "words",
    [
        "plan run.yaml --cluster dgx-h100 --devices 2 --emit run.yaml",
        "plan demo-4m --cluster mine.yaml --devices 2 --emit mine.yaml",
        "predict run.yaml --cluster dgx-h100 --trace run.yaml",
        "launch torchrun run.yaml --devices-per-node 1 --out run.yaml",
        "launch torchrun run.yaml --cluster mine.yaml --out mine.yaml",
    ],
)
def test_commands_keep_what_they_read(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = {"n_layers": 2, "hidden_size": 16, "n_heads": 2, "vocab_size": 64}
    Path("run.yaml").write_text(yaml.safe_dump({"model": model, "data": {"path": "x"}}))
    shutil.copy(configs_dir() / "clusters" / "dgx-h100.yaml", "mine.yaml")
    before = {path: path.read_text() for path in Path().iterdir()}
    tracing = "gridformer.plan.trace_candidates.Tracing"
    monkeypatch.setattr(tracing, lambda *_, **__: pytest.fail("began"))
    done = gridformer_here(*words.split())
    assert done.returncode == 2
    assert "is an input of this command" in done.stderr
    assert {path: path.read_text() for path in Path().iterdir()} == before


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
        "gridformer.plan.trace_candidates.Tracing",
        "gridformer.memory.estimate.estimate_ranks",
    ):
        monkeypatch.setattr(work, lambda *_, **__: pytest.fail("the work has begun"))
    done = CliRunner().invoke(app, words.split())
    assert isinstance(done.exception, UserError), done.output
    assert "/dev/full: is a device" in str(done.exception)


@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "quota")]
)
def test_a_full_disk_names_file_need_and_free_space(
    tmp_path: Path, number: int, words: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(FullDiskError) as raised, writing(path, 5 << 20):
        raise OSError(number, os.strerror(number))  # as `write` raises it, without a name
    text = str(raised.value)
    assert words in text
    assert f"{path} could not be written (5 MiB were to be written, " in text
    assert text.endswith(" are free there)")
    assert is_full(raised.value)


def test_a_device_that_is_always_full(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with pytest.raises(FullDiskError, match="/dev/full could not be written"), writing(full):
        full.write_text("x")


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), writing(tmp_path):
        raise PermissionError(errno.EACCES, "no")
    assert not is_full(PermissionError(errno.EACCES, "no"))
