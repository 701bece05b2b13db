"""Runs that hang, with real processes: the watch says why, in time, on any launcher."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from gridformer.launch.watch import MARGIN_S
from tests.support.launch.hanging import TIMEOUT_S
from tests.support.launch.programs import TORCHRUN, Start, assert_gone, finish, wait_for

# Far more than the ten seconds that are promised, because other tests have the cores.
LATE_S = 60.0


def hangs(
    start: Start, folder: Path, name: str, n: int, *before: str
) -> tuple[str, dict[str, Any]]:
    """Run what hangs. Returns the end of standard error, and the report in the run directory."""
    process = start(f"hanging:{name}", n, *before)
    pids = wait_for(folder, [f"pid{rank}" for rank in range(n)], process)
    began = time.monotonic()
    code, _, err = finish(process)
    assert code == 1, err
    assert time.monotonic() - began < TIMEOUT_S + LATE_S
    assert_gone(pids)
    (path,) = folder.glob("hang-*.json")
    report = json.loads(path.read_text())
    assert "\n".join(report["report"]) in err
    return err, report


def test_a_stopped_rank_is_named(start: Start, tmp_path: Path) -> None:
    err, report = hangs(start, tmp_path, "stopped", 3)
    assert (report["kind"], report["culprits"]) == ("stopped", [1])
    assert (sorted(report["arrived"]), report["missing"]) == ([0, 2], [1])
    pid = (tmp_path / "pid1").read_text()
    assert f"rank 1 (pid {pid} on " in report["reason"]
    assert f"kill -CONT {pid}" in report["reason"]
    said = re.sub(r"waited [\d.]+ s", "waited", err)
    assert (
        f'has waited (train.timeout_s={TIMEOUT_S:g}) in all_reduce on axis col, label "sum", 8 '
        "elements, message 3 of ranks 0, 1 and 2, in step 3, in 0 (forward)."
    ) in said
    assert "Stack of rank 1, as it was" in err
    assert err.rstrip().endswith(".json.")
    assert "Traceback" not in err
    stack = "".join(report["ranks"]["0"]["stack"])
    assert "in forward" in stack
    assert "comm.all_reduce" in stack


@pytest.mark.full
def test_a_slow_rank_is_told_from_a_stopped_one(start: Start, tmp_path: Path) -> None:
    err, report = hangs(start, tmp_path, "slow", 2)
    assert (report["kind"], report["culprits"]) == ("slow", [1])
    assert "torch.randn(100, 100)" in err
    assert "increase train.timeout_s" in report["reason"]


@pytest.mark.full
def test_a_rank_that_sleeps_is_neither(start: Start, tmp_path: Path) -> None:
    err, report = hangs(start, tmp_path, "asleep", 2)
    assert (report["kind"], report["culprits"]) == ("stuck", [1])
    assert "time.sleep(FAR_S)" in err


@pytest.mark.full
def test_ranks_that_start_different_messages_are_named(start: Start, tmp_path: Path) -> None:
    _, report = hangs(start, tmp_path, "other_size", 2)
    assert report["kind"] == "diverged"
    assert report["culprits"] == [0, 1]
    assert 'all_reduce on axis col, label "sum", 8 elements on rank 0' in report["reason"]
    assert 'all_gather on axis col, label "rows", 4 elements on rank 1' in report["reason"]
    assert "number 3 of ranks 0 and 1" in report["reason"]


@pytest.mark.full
def test_ranks_that_wait_for_each_other_are_named(start: Start, tmp_path: Path) -> None:
    _, report = hangs(start, tmp_path, "other_order", 2)
    assert (report["kind"], sorted(report["culprits"])) == ("diverged", [0, 1])
    assert "rank 0 waits for rank 1 in recv on axis pp" in report["reason"]
    assert "rank 1 waits for rank 0 in recv on axis pp" in report["reason"]


@pytest.mark.full
@pytest.mark.parametrize(("name", "kind"), [("stopped", "stopped"), ("slow", "slow")])
def test_a_hang_under_torchrun_is_named(start: Start, tmp_path: Path, name: str, kind: str) -> None:
    err, report = hangs(start, tmp_path, name, 2, *TORCHRUN, "2")
    assert (report["kind"], report["culprits"]) == (kind, [1])
    _, _, cause = err.rpartition("Root Cause (first observed failure)")
    assert "rank      : 0 (local_rank: 0)" in cause
    assert "The run hangs: rank 1" in cause


def test_the_watch_comes_before_the_timeouts_of_torch() -> None:
    assert MARGIN_S < 10.0
