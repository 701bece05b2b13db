"""A rank that fails tells the others, who may wait for it in messages that never end (NCCL)."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from gridformer.launch import hang_board, watch
from gridformer.launch.hang_board import HangBoard, asks_s
from gridformer.launch.watch import HangWatch


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> HangBoard:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    monkeypatch.setattr(hang_board, "store_of", lambda place: store)
    monkeypatch.setattr(hang_board, "at_failure", [])
    return HangBoard(SimpleNamespace(rank=3, size=8, store_file="", by="torchrun"))  # type: ignore[arg-type]


def test_a_failure_is_told_in_the_store(board: HangBoard) -> None:
    assert board.failed() == ""
    board.tell_failed()
    assert board.failed().startswith("rank 3 on ")
    assert not board.is_claimed()


def test_a_run_of_launch_needs_none(board: HangBoard) -> None:
    """`launch` ends the other processes itself."""
    assert hang_board.at_failure == [board.tell_failed]
    HangBoard(SimpleNamespace(rank=0, size=2, store_file="store"))  # type: ignore[arg-type]
    assert hang_board.at_failure == [board.tell_failed]


def test_a_large_run_asks_less_often() -> None:
    assert asks_s(8) == 2.0
    assert asks_s(4096) > 10.0


def test_a_watch_ends_its_process_for_a_failed_peer(
    board: HangBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In less than 10 s, though the main thread is stuck."""
    monkeypatch.setattr(hang_board, "_ASKS_S", 0.1)
    monkeypatch.setattr(watch, "HangBoard", lambda place: board)
    told: list[str] = []
    monkeypatch.setattr(watch, "end_after_peer", told.append)
    place: Any = SimpleNamespace(rank=1, size=8, store_file="", by="torchrun")
    watching = HangWatch(place, 600.0, None, True)
    try:
        time.sleep(0.3)
        assert told == []
        began = time.monotonic()
        board.tell_failed()
        while not told and time.monotonic() - began < 60:
            time.sleep(0.05)
    finally:
        watching.end()
    (who,) = told
    assert who.startswith("rank 3 on ")


def test_a_process_that_ends_for_a_peer_says_so(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        from gridformer.launch.worker_process import end_after_peer
        end_after_peer("rank 3 on b")
    """)
    error_file = tmp_path / "error.json"
    environ = {**os.environ, "RANK": "1", "TORCHELASTIC_ERROR_FILE": str(error_file)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environ, check=False
    )
    assert done.returncode == 1
    assert "rank 1 ends because rank 3 on b has failed" in done.stdout + done.stderr
    assert '"caused_by_peer": true' in error_file.read_text()
