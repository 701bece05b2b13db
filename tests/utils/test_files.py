"""Files that a user names, full disks, and folders that are written completely or not at all."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from gridformer.cli.app import app
from gridformer.config import configs_dir
from gridformer.utils import files
from gridformer.utils.errors import UserError
from tests.support.commands import gridformer_here
from tests.support.launch.programs import ROOT


def test_a_file_in_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    files.check_output("--out", tmp_path / "a" / "b" / "new.yaml")
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
        files.check_output("--emit", Path(path))
    assert str(refused.value).startswith(f"--emit {path}: ")
    assert says in str(refused.value)
    assert Path("file").read_text() == "kept"


def test_what_is_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.yaml").write_text("kept")
    Path("linked.yaml").symlink_to("in.yaml")
    for inputs in (["no-such-name", "in.yaml"], ["", "linked.yaml"]):
        files.check_output("--emit", Path("out.yaml"), inputs)
        with pytest.raises(UserError, match=r"--emit in\.yaml: is an input of this command"):
            files.check_output("--emit", Path("./in.yaml"), inputs)


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


def test_a_full_disk_names_file_need_and_free_space(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for number, words in ((errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "quota")):
        with pytest.raises(files.FullDiskError) as raised, files.writing(path, 5 << 20):
            raise OSError(number, os.strerror(number))  # as `write` raises it, without a name
        text = str(raised.value)
        assert words in text
        assert f"{path} could not be written (5 MiB were to be written, " in text
        assert text.endswith(" are free there)")
        assert files.is_full(raised.value)


def test_only_a_full_device_is_called_full(tmp_path: Path) -> None:
    full = Path("/dev/full")
    with (
        pytest.raises(files.FullDiskError, match="/dev/full could not be written"),
        files.writing(full),
    ):
        full.write_text("x")
    with pytest.raises(PermissionError), files.writing(tmp_path):
        raise PermissionError(errno.EACCES, "no")
    assert not files.is_full(PermissionError(errno.EACCES, "no"))
    with pytest.raises(OSError, match=r"Input/output error: .*/a'$"), files.writing(tmp_path / "a"):
        raise OSError(errno.EIO, "")


def write(target: Path, text: str) -> Path:
    hidden = files.hidden_folder(target)
    files.begin_folder(hidden)
    (hidden / "file").write_text(text)
    return hidden


def test_a_folder_gets_its_name_once_complete(tmp_path: Path) -> None:
    target = tmp_path / "new" / "folder"
    hidden = write(target, "one")
    assert not target.exists()
    files.finish_folder(hidden, target)
    assert (target / "file").read_text() == "one"
    (files.hidden_folder(target) / "leftover").mkdir(parents=True)
    files.finish_folder(write(target, "two"), target)
    assert (target / "file").read_text() == "two"
    assert [path.name for path in target.iterdir()] == ["file"]
    assert [path.name for path in target.parent.iterdir()] == ["folder"]


def test_what_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, rename = tmp_path / "folder", Path.rename
    files.finish_folder(write(target, "old"), target)
    hidden = write(target, "new")

    def fails_for_new(path: Path, to: Path) -> Path:
        if path == hidden:
            raise OSError("no")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", fails_for_new)
    with pytest.raises(OSError, match="no"):
        files.finish_folder(hidden, target)
    assert (target / "file").read_text() == "old"


def test_removed_folders_leave_nothing(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    files.finish_folder(write(target, "old"), target)
    (tmp_path / ".deleting-other").mkdir()
    files.remove_folder(target)
    files.remove_leftovers(tmp_path)
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


def test_a_killed_process_leaves_a_folder_that_its_users_next_run_removes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(prefix="t-") as short:
        folder = Path(short)
        ended, killed = started(folder), started(folder)
        names = [path.name for path in folder.iterdir()]
        assert len(names) == 2, names
        files.remove_private_leftovers(folder)
        assert len([*folder.iterdir()]) == 2, "their processes run"
        ended.communicate("\n")
        assert len([*folder.iterdir()]) == 1
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        with monkeypatch.context() as other_user:
            other_user.setattr(os, "getuid", lambda: -1)
            files.remove_private_leftovers(folder)
        assert len([*folder.iterdir()]) == 1
        kept = [folder / f"gridformer-{name}" for name in (f"{killed.pid}.1-abc", "abc")]
        for path in kept:  # of a container that numbers its processes apart, and of a user
            path.mkdir()
        files.remove_private_leftovers(folder)
        assert sorted(folder.iterdir()) == sorted(kept)


def test_sockets_are_in_tmp_where_the_path_of_a_folder_is_too_long() -> None:
    with tempfile.TemporaryDirectory(prefix="t-") as short:
        long = Path(short) / ("x" * 90)
        long.mkdir()
        process = started(long)
        assert not [*long.iterdir()]
        (folder,) = Path("/tmp").glob(f"gridformer-{process.pid}.*")
        process.send_signal(signal.SIGKILL)
        process.communicate()
        files.remove_private_leftovers()
        assert not folder.exists()
