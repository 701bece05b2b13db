"""A rank fails while its peers are inside a collective: it reports first, and all processes end.

A peer's broken connection must not be taken for the cause, and nothing may delay the report. One of
the peers waits as over NCCL, where the host is in native code and notices neither a signal nor that
a peer is gone. What the ranks wait for takes 600 s, far longer than any limit here.
"""

import json
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from gridformer.cli.errors import errors_as_sentences
from gridformer.launch import worker_process as working
from gridformer.launch.failures import Failure
from gridformer.mesh.process_group import abandon_process_groups
from gridformer.utils import torch_private
from gridformer.utils.errors import DataError, DivergedError
from gridformer.utils.signals import StopPolicy, StopRequest
from tests.support.launch.programs import (
    TORCHRUN,
    assert_gone,
    finish,
    starting,
    wait_for,
)

FAILING = "hanging:one_fails_in_training"
PIDS = ["pid0", "pid1", "pid2"]
STOPPED_S = 10.0  # it takes less than 2 s (docs/how-to/faults.md)
Ended = tuple[float, int, str]


def ends(folder: Path, *before: str) -> Ended:
    """Return how soon after rank 1 raised all processes were gone, the exit code and the errors."""
    folder.mkdir()
    with starting(folder) as start:
        process = start(FAILING, 3, *before)
        pids = wait_for(folder, PIDS, process)
        code, _, err = finish(process)
        assert_gone(pids)
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
    code, err = ends_soon(tmp_path, *TORCHRUN, "3")
    assert code == 1
    _, _, cause = err.rpartition("Root Cause (first observed failure)")
    assert "rank      : 1 (local_rank: 1)" in cause, err
    assert cause.count("Traceback") == 1
    assert "ValueError: the root cause" in cause


def test_giving_up_nccl_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits neither for a destroy nor for an abort that hangs."""
    called = []
    never = threading.Event()

    def abort() -> None:
        called.append("abort")
        never.wait(600.0)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "destroy_process_group", lambda: called.append("destroy"))
    monkeypatch.setattr(torch_private, "abort_groups", abort)
    abandon_process_groups()
    assert called == ["abort"]
    never.set()
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    abandon_process_groups()
    assert called == ["abort"], "gloo's sockets close by themselves"


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


@pytest.mark.parametrize(
    ("error", "code"), [(DivergedError("loss is nan in step 9"), 1), (DataError("no tokens"), 2)]
)
def test_exit_code_of_a_run_that_fails_in_the_middle(
    error: Exception,
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    working._write_failure(error)
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    with pytest.raises(SystemExit) as ended, errors_as_sentences():
        Failure(1, 1, 1, message).report_and_exit()
    assert ended.value.code == code
    assert str(error) in capsys.readouterr().err
