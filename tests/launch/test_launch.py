"""Starting and stopping workers, with real processes and signals, and bounded in time."""

import contextlib
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gridformer.mesh.process_group import check_devices, init_process_groups
from gridformer.utils.errors import UserError
from gridformer.utils.process import n_cores
from tests.support.launch.programs import (
    LIMIT_S,
    Start,
    assert_gone,
    finish,
    still_runs,
    wait_for,
)

SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
}


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
    code, _, err = finish(process)
    assert code == 128 + signum
    assert err.count("\n") == 1, err
    assert signum.name in err
    assert all((tmp_path / f"saved{r}").exists() for r in range(n))
    assert_gone(pids)


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
    code, _, err = finish(process)
    assert code == 75, err
    assert err == "gridformer: stopped by SIGUSR1; exit code 75: start it again to go on\n"
    assert all((tmp_path / f"saved{rank}").exists() for rank in range(2))
    assert_gone(pids)


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


@pytest.mark.parametrize(
    ("gpus", "device", "n", "nproc", "problem"),
    [
        (4, "cuda", 4, 4, ""),
        (0, "auto", 4, None, ""),
        (0, "cpu", 16, None, ""),
        (
            2,
            "cuda",
            4,
            None,
            "4 processes on this machine and 2 GPUs: .* at most 2, or ",
        ),
        (0, "cuda", 1, None, "no GPU"),
        (
            0,
            "cpu",
            4,
            2,
            r"--nproc=2, but the layout needs 4 processes \(rows x cols x branches ",
        ),
    ],
)
def test_devices_suffice(
    gpus: int, device: Any, n: int, nproc: int | None, problem: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
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
