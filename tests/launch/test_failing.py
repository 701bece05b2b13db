"""A rank fails: it reports first, all processes end, and what it says comes before its traceback.

One of its peers waits as over NCCL, where the host is in native code and notices neither a signal
nor that a peer is gone. What the ranks wait for takes 600 s, far longer than any limit here.
"""

import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gridformer.cli.errors import errors_as_sentences
from gridformer.comm.progress import Progress
from gridformer.launch import worker_process as working
from gridformer.launch.failures import Failure, cause_of, kill_cause, oom_kills, out_of_memory
from gridformer.utils.errors import DataError, DivergedError, SaveError
from gridformer.utils.files import FullDiskError
from gridformer.utils.signals import StopPolicy, StopRequest
from tests.support.launch import programs

FAILING = "hanging:one_fails_in_training"
PIDS = ["pid0", "pid1", "pid2"]
STOPPED_S = 10.0  # it takes less than 2 s (docs/how-to/faults.md)
Ended = tuple[float, int, str]


def ends(folder: Path, *before: str) -> Ended:
    """Return how soon after rank 1 raised all processes were gone, the exit code and the errors."""
    folder.mkdir()
    with programs.starting(folder) as start:
        process = start(FAILING, 3, *before)
        pids = programs.wait_for(folder, PIDS, process)
        code, _, err = programs.finish(process)
        programs.assert_gone(pids)
        seconds = time.time() - float((folder / "raised1").read_text())
    assert not list(folder.glob("left*")), "the group was left while peers were in collectives"
    return seconds, code, err


def ends_soon(folder: Path, *before: str) -> tuple[int, str]:
    """Check that all processes are gone soon after rank 1 raised.

    They have a second chance, since others may use the machine. A rank that does not report first
    takes 600 s each time.
    """
    seconds, code, err = ends(folder / "first", *before)
    if seconds >= STOPPED_S:
        seconds, code, err = ends(folder / "second", *before)
    print(f"all processes were gone {seconds:.1f} s after the error")
    assert seconds < STOPPED_S
    return code, err


def test_a_rank_that_fails_reports_before_it_leaves(tmp_path: Path) -> None:
    code, err = ends_soon(tmp_path)
    assert code == 1
    assert err.startswith("rank 1 failed:\n\nTraceback"), err
    assert err.endswith("ValueError: the root cause\n"), err


def test_a_rank_that_fails_reports_to_torchrun(tmp_path: Path) -> None:
    code, err = ends_soon(tmp_path, *programs.TORCHRUN, "3")
    assert code == 1
    _, _, cause = err.rpartition("Root Cause (first observed failure)")
    assert "rank      : 1 (local_rank: 1)" in cause, err
    assert cause.count("Traceback") == 1
    assert "ValueError: the root cause" in cause


def test_the_report_comes_before_the_groups_are_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "error.json"
    seen: list[Any] = []

    def end(code: int) -> None:
        seen.append(code)
        raise SystemExit(code)

    def abandon() -> None:
        seen.append(json.loads(report.read_text())["message"]["message"])

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(working, "abandon_process_groups", abandon)
    monkeypatch.setattr(working.signals, "end_process", end)
    monkeypatch.setenv("RANK", "0")
    place = working.RankEnv(0, 2, 0, 2, "torchrun")

    def entrypoint() -> None:
        raise ValueError("the root cause")

    with pytest.raises(SystemExit):
        working.work_here(entrypoint, (), place)
    assert seen == ["ValueError: the root cause", 1]
    assert capfd.readouterr().err.endswith("ValueError: the root cause\n")


@pytest.mark.parametrize("a_peer_has_failed", [True, False])
def test_a_rank_told_to_stop_leaves_the_report_to_the_peer_that_failed(
    a_peer_has_failed: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The launcher's signal and the broken connection may arrive in either order."""
    meeting = working.Meeting(tmp_path)
    if a_peer_has_failed:
        meeting.failed.touch()
    stop = StopRequest.__new__(StopRequest)  # without handlers of signals
    stop.policy, stop.cause, stop._outcome = StopPolicy(), "SIGTERM", ""
    stop.is_hopeless = meeting.is_hopeless
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(working.signals, "end_process", sys.exit)
    with pytest.raises(SystemExit) as ended:
        working._fail(RuntimeError("Connection closed by peer"), stop)
    assert ended.value.code == 143
    said = capfd.readouterr().err
    assert said == "" if a_peer_has_failed else "no new checkpoint" in said


def test_what_explains_the_end_of_a_run() -> None:
    broken = Failure(0, 100, 1, {"time": 1.0, "caused_by_peer": True})
    raised = Failure(1, 101, 1, {"time": 3.0, "caused_by_peer": False})
    earlier = Failure(2, 102, 1, {"time": 2.0, "caused_by_peer": False})
    killed = Failure(3, 103, -signal.SIGKILL, {})
    aborted = Failure(4, 104, -signal.SIGABRT, {})  # aborted by NCCL's watchdog
    stopped = Failure(5, 105, 128 + signal.SIGTERM, {})

    def first(*failures: Failure) -> Failure:
        return min(failures, key=Failure.order)

    assert first(broken, raised, earlier, aborted, stopped) is earlier
    assert first(broken, killed, raised) is killed
    assert first(aborted, broken) is aborted
    assert first(stopped, broken) is broken


Report = Callable[[Exception], dict[str, Any]]


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    """Return what a rank reports of an error."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    def reported(error: Exception) -> dict[str, Any]:
        working._write_failure(error)
        message: dict[str, Any] = json.loads((tmp_path / "error.json").read_text())["message"]
        return message

    return reported


@pytest.mark.parametrize(
    ("error", "code"), [(DivergedError("loss is nan in step 9"), 1), (DataError("no tokens"), 2)]
)
def test_exit_code_of_a_run_that_fails_in_the_middle(
    error: Exception, code: int, report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, errors_as_sentences():
        Failure(1, 1, 1, report(error)).report_and_exit()
    assert ended.value.code == code
    assert str(error) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [(FullDiskError(errno.EDQUOT, Path("runs/a/tensorboard")),
      "this user's quota on the disk is used up: runs/a/tensorboard could not be written ("),
     (OSError(errno.EMFILE, "Too many open files", "runs/a/lock"),
      "too many open files: raise the limit, such as by `ulimit -n")],
)  # fmt: skip
def test_a_run_of_one_process_says_what_a_limit_means(
    error: OSError, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its errors do not pass through a launcher."""
    with pytest.raises(SystemExit) as ended, errors_as_sentences():
        raise error
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith(f"error: {said}")


GPU = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.10 GiB of "
    "which 12.75 MiB is free."
)
CPU = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 4294967296 bytes. Error code 12 (Cannot allocate memory)"
)
HOST = "the memory of this machine, or what this process may have of it, is used up"
MEANINGS: list[tuple[Exception, str]] = [
    (torch.OutOfMemoryError(GPU),
     "^the memory of the GPU of 79.10 GiB is used up: 20.00 MiB more were asked for$"),
    (MemoryError(), f"^{HOST}$"),
    (RuntimeError(CPU), f"^{HOST}: 4 GiB more were asked for$"),
    (FullDiskError(errno.ENOSPC, Path("runs/a/metrics.jsonl"), 100),
     "^the disk is full: runs/a/metrics.jsonl could not be written [(].*; free some, or choose "
     "--out on another disk$"),
    (RuntimeError("shapes differ"), "^$"),
    (FileNotFoundError(errno.ENOENT, "no", "a"), "^$"),
]  # fmt: skip


def test_what_an_error_means() -> None:
    for error, meaning in MEANINGS:
        assert re.search(meaning, cause_of(error)), error
        assert (out_of_memory(error) is not None) == ("memory" in meaning), error


def test_torch_says_it_like_this() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert cause_of(raised.value).endswith(f": {1 << 30:,} GiB more were asked for")


def test_a_failed_save_is_told_by_the_rank_that_knows_why(report: Report) -> None:
    """The others report it too, and may be earlier: the run must not end with their sentence."""
    errors = (SaveError("why"), SaveError("another says why", elsewhere=True))
    knows, other = (Failure(rank, 4711, 1, report(error)) for rank, error in enumerate(errors))
    assert [failure.ends_all for failure in (knows, other)] == [True, False]
    assert min((other, knows), key=Failure.order).text() == "gridformer: why"
    assert other.text() == "gridformer: another says why"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("with_a_full_disk", "the disk is full: /dev/full could not be written ("),
        ("with_too_many_files", "too many open files: raise the limit, such as by `ulimit -n"),
    ],
)
def test_the_rank_that_meets_a_limit_says_so(start: programs.Start, name: str, said: str) -> None:
    code, _, err = programs.finish(start(f"{name}", 3))
    assert code == 1
    (line,) = err.splitlines()
    assert line.startswith(f"rank 1 failed: {said}")


def test_a_report_that_cannot_be_written_is_printed(start: programs.Start, tmp_path: Path) -> None:
    """As where TMPDIR has become full."""
    code, _, err = programs.finish(start("with_a_full_folder", 2))
    assert code == 1
    assert "Traceback" not in err
    assert "rank 1 failed: the disk is full: /dev/full could not be written (" in err


def test_a_file_that_may_not_be_large_enough_is_named(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(FullDiskError, match="/progress could not be written") as raised:
            Progress(tmp_path / "progress")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "ulimit -f" in cause_of(raised.value)


@pytest.mark.full
def test_innocent_ranks_show_no_traceback(start: programs.Start) -> None:
    """As torchrun and srun show what all ranks print."""
    code, _, err = programs.finish(start("with_a_full_disk", 3, *programs.TORCHRUN, "3"))
    assert code == 1
    before, _, cause = err.rpartition("Root Cause (first observed failure)")
    assert "rank      : 1 (local_rank: 1)" in cause
    assert before.count("rank 1 failed: the disk is full") <= 1, err
    assert "FullDiskError" not in before
    assert "Connection closed by peer" not in before or "ends because its connection" in before


def test_this_needs_no_torch() -> None:
    code = "import sys, gridformer.launch.failures; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=programs.ROOT, check=True)


def counters(root: Path, version: int, kills: int, of_all: int) -> dict[Path, int]:
    """Return what is read of the counters of a control group and of the whole machine."""
    group = "0::/jobs/4711" if version == 2 else "5:cpu:/\n4:memory:/jobs/4711"
    folder = root / "sys/fs/cgroup" / ("" if version == 2 else "memory") / "jobs/4711"
    folder.mkdir(parents=True, exist_ok=True)
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(group + "\n")
    text = f"low 0\noom 3\noom_kill {kills}\noom_group_kill 0\n"
    (folder / ("memory.events" if version == 2 else "memory.oom_control")).write_text(text)
    limit = folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")
    limit.write_text(f"{3 << 30}\n")
    (root / "proc/vmstat").write_text(f"pgfault 12\noom_kill {of_all}\n")
    return oom_kills(root)


@pytest.mark.parametrize(
    ("version", "kills", "of_all", "said"),
    [
        (1, 3, 6, "killer, for its control group, whose limit is 3 GiB"),
        (2, 3, 6, "killer, for its control group, whose limit is 3 GiB"),
        (2, 2, 6, "most likely by the kernel's"),
        (2, 2, 5, "but not by the kernel's out-of-memory killer"),
    ],
)
def test_who_killed(version: int, kills: int, of_all: int, said: str, tmp_path: Path) -> None:
    before = counters(tmp_path, version, 2, 5)
    assert said in kill_cause(before, counters(tmp_path, version, kills, of_all))
    assert kill_cause(oom_kills(tmp_path / "none"), oom_kills(tmp_path / "none")) == ""


LIMIT_BYTES = 2 << 30  # far more than three idle processes need


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with a limit, which takes rights that few users have."""
    old, new = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    folder = (old if old.is_dir() else new) / f"gridformer-test-{os.getpid()}"
    name = "memory.limit_in_bytes" if old.is_dir() else "memory.max"
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("no control group can be made here")
    try:
        (folder / name).write_text(str(LIMIT_BYTES))
        with suppress(OSError):
            (folder / "memory.swap.max").write_text("0")
    except OSError:
        folder.rmdir()
        pytest.skip("no control group can be limited here")
    yield folder
    until = time.monotonic() + programs.LIMIT_S
    while (folder / "cgroup.procs").read_text():  # what the run leaves ends a moment later
        assert time.monotonic() < until
        time.sleep(0.05)
    folder.rmdir()


@pytest.mark.full
def test_the_kernels_killer_is_named(start: programs.Start, group: Path) -> None:
    code, _, err = programs.finish(start("needing_memory", 3, env={"CONTROL_GROUP": str(group)}))
    assert code == 1, err
    said = err.strip().splitlines()[-1]
    assert re.match(r"rank 1 \(pid \d+\) was killed by signal 9 \(SIGKILL\) ", said), err
    assert "by the kernel's out-of-memory killer, for its control group" in said
    assert "whose limit is 2 GiB" in said
    assert "Traceback" not in err


@pytest.mark.full
def test_memory_that_is_refused_is_named(start: programs.Start) -> None:
    code, _, err = programs.finish(start("needing_memory", 3, env={"MORE_BYTES": str(512 << 20)}))
    assert code == 1, err
    assert err.startswith("rank 1 failed: the memory of this machine, or what this process may "), (
        err
    )
    assert "64 MiB more were asked for; try " in err.splitlines()[0]
    assert err.count("Traceback") == 1
