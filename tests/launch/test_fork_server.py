"""The fork server is killed: while a run trains, and while it starts its workers."""

import os
import signal
from pathlib import Path

import pytest

from tests.support.launch.programs import Start, assert_gone, finish, wait_for


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
