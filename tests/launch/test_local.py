"""How long the launcher waits for workers whose time is over, and what they leave it to read."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from gridformer.launch import local
from gridformer.launch.worker_process import Meeting
from gridformer.utils.signals import StopPolicy


def workers(folder: Path) -> local._Workers:
    """Return the launcher's view of two workers, none of which is started."""
    return local._Workers(2, Meeting(folder), StopPolicy(grace_s=1.0))


def test_a_save_gets_as_long_as_it_takes_and_then_time_to_leave(tmp_path: Path) -> None:
    two = workers(tmp_path)
    two.meeting.saving(1).touch()
    for now in (10.0, 11.0, 100.0):
        assert two._has_more_time(now)
        assert two._kill_at == now + local._MORE_PATIENCE_S, "it looks again soon"
    two.meeting.saving(1).unlink()
    assert two._has_more_time(101.0)
    assert two._kill_at == 101.0 + local._LEAVES_S
    assert not two._has_more_time(111.0), "only once"


def test_workers_that_do_not_save_get_no_more_time(tmp_path: Path) -> None:
    two = workers(tmp_path)
    assert not two._has_more_time(10.0)
    assert not two._has_more_time(11.0)


class KilledError(BaseException):
    pass


def test_what_stopped_a_run_is_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several ranks write it, and on a busy machine each may be killed meanwhile."""
    meeting = Meeting(tmp_path)
    write = Path.write_text

    def killed(path: Path, text: str, encoding: str) -> None:
        write(path, text[:0], encoding)
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", killed)
        with pytest.raises(KilledError):
            meeting.tell_stopped("SIGUSR1")
    assert not meeting.stopped.exists()
    meeting.tell_stopped("SIGUSR1")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", killed)
        with pytest.raises(KilledError):
            meeting.tell_stopped("SIGUSR1")
    assert meeting.stopped.read_text(encoding="utf-8") == "SIGUSR1"


LEAVES_A_BAR = """
import os, signal, sys
from gridformer.launch import launch

def work():
    if os.environ["RANK"] == "0":
        print("\\x1b[?25l a bar", end="", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()

if __name__ == "__main__":
    launch(work, (), 2)
"""


def test_the_progress_bar_of_a_killed_rank_is_cleared_before_the_cause_is_told(
    tmp_path: Path,
) -> None:
    """Otherwise the cause would stand behind the bar, and the terminal stay without a cursor."""
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES_A_BAR)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=theirs, stderr=theirs, env=environment
    ):
        os.close(theirs)
        said = b""
        with contextlib.suppress(OSError):  # nobody has the other end any more
            while more := os.read(ours, 4096):
                said += more
    os.close(ours)
    bar, cleared, cause = said.decode().partition("\r\x1b[2K\x1b[?25h")
    assert bar.endswith(" a bar")
    assert cleared
    assert cause.startswith("rank 0 (pid ")
