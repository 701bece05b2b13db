"""How long the launcher waits for workers, what it reads of them, and a dead fork server."""

from __future__ import annotations

import contextlib
import itertools
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gridformer.launch import local
from gridformer.launch.processes import signals_seen
from gridformer.launch.worker_process import Meeting, write_whole
from gridformer.utils.signals import StopPolicy
from tests.support.launch.programs import Start, assert_gone, finish, wait_for


def test_a_save_gets_as_long_as_it_takes_and_then_time_to_leave(tmp_path: Path) -> None:
    two = local._Workers(2, Meeting(tmp_path), StopPolicy(grace_s=1.0))
    assert not two._has_more_time(10.0), "nobody saves"
    assert not two._has_more_time(11.0)
    two.meeting.saving(1).touch()
    for now in (20.0, 21.0, 100.0):
        assert two._has_more_time(now)
        assert two._kill_at == now + local._MORE_PATIENCE_S, "it looks again soon"
    two.meeting.saving(1).unlink()
    assert two._has_more_time(101.0)
    assert two._kill_at == 101.0 + local._LEAVES_S
    assert not two._has_more_time(111.0), "only once"


@pytest.mark.parametrize("stopped", ["the ranks", "all"])
def test_a_run_whose_ranks_are_all_stopped_ends_with_a_sentence(
    start: Start, tmp_path: Path, stopped: str
) -> None:
    process = start("fails_when_it_goes_on", 2)
    pids = wait_for(tmp_path, ["pid0", "pid1"], process)
    if stopped == "all":  # and they go on, too late for messages
        os.killpg(process.pid, signal.SIGSTOP)
        time.sleep(4.0)
        os.killpg(process.pid, signal.SIGCONT)
    else:
        for pid in pids:
            os.kill(int(pid), signal.SIGSTOP)
    code, _, err = finish(process)
    assert code == 1
    (line,) = err.splitlines()
    assert re.match(r"All ranks were stopped for \d+ s, as by SIGSTOP or Ctrl-Z ", line)
    assert_gone(pids)


def test_only_a_second_ctrl_c_ends_a_run_at_once() -> None:
    """A second SIGTERM is common: a cluster sends it to a process and to its group.

    A test run in the background of a shell ignores SIGINT, and so would what it starts.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    for first, second in itertools.product((signal.SIGINT, signal.SIGTERM), repeat=2):
        with signals_seen(StopPolicy()) as seen:
            signal.raise_signal(first)
            signal.raise_signal(second)
        assert (seen.first, seen.again) == (first, first == second == signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def test_what_stopped_a_run_is_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several ranks write it, and on a busy machine each may be killed meanwhile."""
    meeting, write = Meeting(tmp_path), Path.write_text

    def killed(path: Path, text: str, encoding: str) -> None:
        write(path, text[:0], encoding)
        raise KeyboardInterrupt

    for before in ("", "SIGUSR1"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_text", killed)
            with pytest.raises(KeyboardInterrupt):
                write_whole(meeting.stopped, "SIGUSR1")
        assert meeting.stopped.exists() == bool(before)
        write_whole(meeting.stopped, "SIGUSR1")
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


def parent_of(pid: str) -> int:
    """Return the id of the process that forked a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_dead_fork_server_is_named_and_the_ranks_save(start: Start, tmp_path: Path) -> None:
    process = start("steps", 2)
    pids = wait_for(tmp_path, ["pid0", "pid1"], process)
    server = parent_of(pids[0])
    assert server not in (process.pid, os.getpid())
    os.kill(server, signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 1, err
    (line,) = err.splitlines()
    assert line.startswith(
        f"The fork server (pid {server}), from which all ranks were started, was"
    )
    assert "killed by signal 9 (SIGKILL)" in line
    assert "exited with code 255" not in err, "no rank is blamed"
    assert (tmp_path / "saved0").exists()
    assert (tmp_path / "saved1").exists()
    assert_gone(pids)


@pytest.mark.full
def test_a_signal_to_all_processes_is_not_the_end_of_the_fork_server(
    start: Start, tmp_path: Path
) -> None:
    """As `scancel` sends it. The launcher still waits until all ranks have saved."""
    process = start("steps", 2)
    pids = wait_for(tmp_path, ["pid0", "pid1"], process)
    os.killpg(process.pid, signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 128 + signal.SIGTERM, err
    assert "fork server" not in err
    assert (tmp_path / "saved0").exists()
    assert (tmp_path / "saved1").exists()
    assert_gone(pids)


@pytest.mark.full
def test_a_fork_server_that_dies_while_it_starts_ranks(start: Start, tmp_path: Path) -> None:
    process = start("starting:killing_the_server", 3)
    code, _, err = finish(process)
    assert code == 1, err
    assert err.splitlines()[-1].startswith("The fork server (pid "), err
    assert "Traceback" not in err
