"""Starting, watching and stopping workers, with real processes and signals, and bounded in time."""

import contextlib
import itertools
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gridformer.launch import local
from gridformer.launch.processes import signals_seen
from gridformer.launch.worker_process import Meeting, write_whole
from gridformer.mesh.process_group import check_devices, init_process_groups
from gridformer.utils.errors import UserError
from gridformer.utils.process import n_cores
from gridformer.utils.signals import StopPolicy
from tests.support.launch.programs import LIMIT_S, Start, assert_gone, finish, still_runs, wait_for

SRUN = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "2", "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
}  # fmt: skip


def test_workers_form_a_group(start: Start, tmp_path: Path) -> None:
    code, out, err = finish(start("sums", 2))
    assert (code, err) == (0, "")
    cores = n_cores()
    for rank in range(2):
        assert (tmp_path / f"sum{rank}").read_text() == f"{rank}/2 2 {max(1, cores // 2)}"
        if sys.platform == "linux":
            assert (tmp_path / f"allocator{rank}").read_text() == "expandable_segments:True"
    assert "2 processes over" in out


def test_one_process_runs_here_without_a_group(start: Start, tmp_path: Path) -> None:
    code, out, err = finish(start("sums", 1))
    assert (code, err) == (0, "")
    assert (tmp_path / "sum0").read_text().startswith("0/1 1")
    assert "one process on" in out


def test_srun_is_joined(start: Start, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {**SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    shared |= {"SLURM_NODEID": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"GLOO_SOCKET_IFNAME": "lo"}
    # RANK only names the file that the entrypoint writes.
    names = ("SLURM_PROCID", "SLURM_LOCALID", "RANK")
    tasks = [start("sums", 2, env=shared | dict.fromkeys(names, str(r))) for r in range(2)]
    for task in tasks:
        code, _, err = finish(task)
        assert code == 0, err
    assert {(tmp_path / f"sum{r}").read_text()[:5] for r in range(2)} == {"0/2 2", "1/2 2"}


def saved(process: subprocess.Popen[str], folder: Path, pids: list[str]) -> tuple[int, str]:
    """Return the exit code and the errors of a run that ends once all of its ranks have saved."""
    code, _, err = finish(process)
    assert all((folder / f"saved{rank}").exists() for rank in range(len(pids))), err
    assert_gone(pids)
    return code, err


@pytest.mark.parametrize(
    ("n", "signum", "to_group"),
    [
        (2, signal.SIGINT, True),
        # test_privacy.py ends its run like this
        pytest.param(2, signal.SIGTERM, False, marks=pytest.mark.full),
        (1, signal.SIGINT, True),
    ],
)
def test_a_signal_saves_and_stops(
    start: Start, tmp_path: Path, n: int, signum: signal.Signals, to_group: bool
) -> None:
    process = start("steps", n)
    pids = wait_for(tmp_path, [f"pid{r}" for r in range(n)], process)
    (os.killpg if to_group else os.kill)(process.pid, signum)
    code, err = saved(process, tmp_path, pids)
    assert code == 128 + signum
    assert err.count("\n") == 1, err
    assert signum.name in err


@pytest.mark.parametrize("twice", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_step_longer_than_the_grace_is_cut(start: Start, tmp_path: Path, twice: bool) -> None:
    """The second Ctrl-C of an impatient user cuts it at once, without a traceback."""
    process = start("one_step_that_no_grace_ends" if twice else "one_long_step", 2)
    pids = wait_for(tmp_path, ["pid0", "pid1"], process)
    os.killpg(process.pid, signal.SIGINT)
    until = time.monotonic() + LIMIT_S
    while twice and time.monotonic() < until:
        time.sleep(0.3)  # two signals that a busy machine delivers at once are one
        if not all(map(still_runs, pids)):
            break  # it is cut, and a launcher that is about to exit has Python's own handler again
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
    assert_gone(pids)
    code, _, err = finish(process)
    assert code == 130
    assert "no new checkpoint" in err
    # the line may also name a rank
    last = err.rstrip().splitlines()[-1]
    assert "stopped by Ctrl-C (SIGINT)" in last
    assert ("twice" in last) == twice
    assert "Traceback" not in err


def test_a_save_is_not_cut_when_the_grace_ends(start: Start, tmp_path: Path) -> None:
    """The save ends only when the grace is over; then the run asks to be started again."""
    process = start("one_long_save", 2)
    pids = wait_for(tmp_path, ["pid0", "pid1"], process)
    os.kill(process.pid, signal.SIGUSR1)
    code, err = saved(process, tmp_path, pids)
    assert code == 75, err
    assert err == "gridformer: stopped by SIGUSR1; exit code 75: start it again to go on\n"


def test_workers_end_when_the_launcher_is_killed(start: Start, tmp_path: Path) -> None:
    process = start("one_long_step", 2)
    pids = wait_for(tmp_path, ["pid0", "pid1"], process)
    process.kill()
    assert_gone(pids)


def test_a_killed_worker_is_named(start: Start) -> None:
    code, _, err = finish(start("one_is_killed", 3))
    assert code == 1
    last = err.splitlines()[-1]
    assert last.startswith("rank 1 (pid ")
    assert "was killed by signal 9 (SIGKILL)" in last
    if sys.platform == "linux":  # whose counters say that it was not for want of memory
        assert "not by the kernel's out-of-memory killer" in last
    assert "Traceback" not in err


@pytest.mark.parametrize("entrypoint", ["config_error", "config_error_of_one_that_stops"])
def test_a_user_error_is_its_message(start: Start, entrypoint: str) -> None:
    code, _, err = finish(start(entrypoint, 2))
    assert (code, err) == (2, "ConfigError: first problem\nsecond problem\n")


def test_the_others_are_not_waited_for_when_one_has_lost_a_peer(start: Start) -> None:
    code, _, err = finish(start("one_has_lost_another", 3))
    assert (code, err) == (1, "gridformer: another rank could not save\n")


@pytest.mark.parametrize(
    ("gpus", "device", "n", "nproc", "problem"),
    [
        (4, "cuda", 4, 4, ""),
        (0, "auto", 4, None, ""),
        (0, "cpu", 256, None, ""),
        (0, "cpu", 257, None, "one machine with 1 cores starts at most 256"),
        (2, "cuda", 4, None, "4 processes on this machine and 2 GPUs: .* at most 2, or "),
        (0, "cuda", 1, None, "no GPU"),
        (0, "cpu", 4, 2, r"--nproc=2, but the layout needs 4 processes \(rows x cols x branches "),
    ],
)
def test_devices_suffice(
    gpus: int, device: Any, n: int, nproc: int | None, problem: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr("gridformer.mesh.process_group.n_cores", lambda: 1)
    found = check_devices(device, n, nproc)
    assert len(found) == bool(problem)
    assert re.search(problem, "".join(found)), found


def test_processes_that_cannot_form_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="torchrun or srun"):
        init_process_groups("cpu", 2, 1.0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match="no GPU"):
        init_process_groups("cuda", 1, 1.0)
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    (problem,) = check_devices("cpu", 8)
    assert "srun started 7 processes, but the layout needs 8" in problem
    with pytest.raises(UserError, match="srun started 7"):
        init_process_groups("cpu", 8, 1.0)


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
    code, err = saved(process, tmp_path, pids)
    assert code == 1, err
    (line,) = err.splitlines()
    assert line.startswith(
        f"The fork server (pid {server}), from which all ranks were started, was"
    )
    assert "killed by signal 9 (SIGKILL)" in line
    assert "exited with code 255" not in err, "no rank is blamed"


@pytest.mark.full
def test_a_signal_to_all_processes_is_not_the_end_of_the_fork_server(
    start: Start, tmp_path: Path
) -> None:
    """As `scancel` sends it. The launcher still waits until all ranks have saved."""
    process = start("steps", 2)
    pids = wait_for(tmp_path, ["pid0", "pid1"], process)
    os.killpg(process.pid, signal.SIGTERM)
    code, err = saved(process, tmp_path, pids)
    assert code == 128 + signal.SIGTERM, err
    assert "fork server" not in err


@pytest.mark.full
def test_a_fork_server_that_dies_while_it_starts_ranks(start: Start, tmp_path: Path) -> None:
    process = start("killing_the_server", 3)
    code, _, err = finish(process)
    assert code == 1, err
    assert err.splitlines()[-1].startswith("The fork server (pid "), err
    assert "Traceback" not in err
