"""RUNDIR/lock: one run at a time, its holder named, and a dead one's lock taken over."""

import fcntl
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gridformer.launch import run_lock
from gridformer.launch.processes import process_stat
from gridformer.launch.run_lock import LOCK, RunLock, holder_of, is_held, this_process
from gridformer.utils.errors import UserError


def written(run_dir: Path, age_s: float = 0.0, **other: Any) -> Path:
    """Write a lock like this process's, except for some values."""
    path, holder = run_dir / LOCK, this_process()
    path.write_text(holder.model_copy(update={"token": "theirs", **other}).model_dump_json())
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def left(run_dir: Path) -> list[str]:
    return sorted(path.name for path in run_dir.iterdir())


def test_a_second_run_is_refused_and_the_holder_named(tmp_path: Path) -> None:
    with RunLock() as first:
        first.take(tmp_path)
        first.take(tmp_path)  # it may plan again
        assert is_held(tmp_path)
        with RunLock() as second, pytest.raises(UserError) as error:
            second.take(tmp_path)
        for part in (f"process {os.getpid()} on ", "since 2", "(gridformer", "another --out"):
            assert part in str(error.value)
        assert left(tmp_path) == [LOCK], "the refused one has removed nothing and left nothing"
    assert left(tmp_path) == []
    with RunLock() as later:
        later.take(tmp_path)


def test_the_lock_of_an_ended_process_is_stale_at_once(tmp_path: Path) -> None:
    ended, zombie = subprocess.Popen(["true"]), subprocess.Popen(["true"])
    ended.wait()
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    of_zombie = {"pid": zombie.pid, "began": process_stat(zombie.pid)[1]}
    number_used_again = {"began": 1}
    for other in ({"pid": ended.pid}, number_used_again, of_zombie):
        written(tmp_path, **other)
        assert not is_held(tmp_path)
        began = time.monotonic()
        with RunLock() as lock:
            lock.take(tmp_path)
            holder = holder_of(tmp_path)
            assert holder is not None
            assert holder.token != "theirs"
        assert time.monotonic() - began < run_lock.REFRESH_S
        assert left(tmp_path) == []
    zombie.wait()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "_POLL_S", 0.02)
    monkeypatch.setattr(run_lock, "REFRESH_S", 0.02)


@pytest.mark.parametrize("other", [{"machine": "elsewhere"}, {"machine": "a container"}])
def test_another_hosts_lock_is_stale_once_it_is_old(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    written(tmp_path, run_lock.STALE_S + 9, **other)
    with RunLock() as lock:
        lock.take(tmp_path)
    monkeypatch.setattr(run_lock, "STALE_S", 0.2)
    for day_s in (0.0, -86_400.0):  # the clock of that host is right, or a day ahead
        written(tmp_path, day_s, **other)
        told: list[str] = []
        with RunLock() as lock:
            lock.take(tmp_path, told.append)
        assert told
        assert all("waiting until it is refreshed" in text for text in told)


def test_another_hosts_lock_that_is_refreshed_is_respected(tmp_path: Path, quick: None) -> None:
    path = written(tmp_path, 20.0, host="elsewhere", machine="elsewhere")
    threading.Timer(0.2, os.utime, [path]).start()
    with RunLock() as lock, pytest.raises(UserError, match="on elsewhere since"):
        lock.take(tmp_path)
    assert left(tmp_path) == [LOCK]


def test_a_torn_lock_is_waited_for(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not for long: its writer was killed, or found the disk full."""
    (tmp_path / LOCK).write_text("{")
    monkeypatch.setattr(run_lock, "REFRESH_S", 0.2)
    with RunLock() as lock:
        lock.take(tmp_path)


def test_one_of_many_takes_a_stale_lock(tmp_path: Path) -> None:
    locks = [RunLock() for _ in range(8)]
    for _ in range(20):
        written(tmp_path, began=1)
        start = threading.Barrier(len(locks))

        def take(lock: RunLock, start: threading.Barrier = start) -> bool:
            start.wait()
            try:
                lock.take(tmp_path)
            except UserError:
                return False
            return True

        with ThreadPoolExecutor(len(locks)) as threads:
            assert sum(threads.map(take, locks)) == 1
        for lock in locks:
            lock.release()
        assert left(tmp_path) == []


def test_a_stale_lock_is_not_confused_with_the_next_one(tmp_path: Path) -> None:
    """Between finding a lock stale and replacing it, another process may have taken its place."""
    path, mine = written(tmp_path, began=1), this_process()
    content = path.read_text()
    assert not run_lock._take_over(path, "of the one before", mine)
    assert path.read_text() == content
    assert run_lock._take_over(path, "theirs", mine)
    assert not run_lock._take_over(path, "theirs", mine.model_copy(update={"token": "another"}))
    assert holder_of(tmp_path) == mine
    path.unlink()
    assert not run_lock._take_over(path, "theirs", mine)
    assert left(tmp_path) == []


def test_one_takes_over_after_the_other(tmp_path: Path) -> None:
    path = written(tmp_path, began=1)
    with ThreadPoolExecutor(1) as thread, path.open("rb") as stale:
        fcntl.flock(stale, fcntl.LOCK_EX)
        later = thread.submit(run_lock._take_over, path, "theirs", this_process())
        time.sleep(0.2)
        assert not later.done()
        path.unlink()
        written(tmp_path, token="of the first")
        stale.close()
        assert not later.result()
    assert getattr(holder_of(tmp_path), "token", "") == "of the first"


def test_the_lock_of_another_is_not_given_back(tmp_path: Path) -> None:
    with RunLock() as lock:
        lock.take(tmp_path)
        written(tmp_path)
    assert left(tmp_path) == [LOCK]


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be written \(Not a directory\): choose another"):
        RunLock().take(tmp_path / "file" / "out")


def test_a_holder_refreshes_its_lock(tmp_path: Path, quick: None) -> None:
    with RunLock() as lock:
        lock.take(tmp_path)
        os.utime(tmp_path / LOCK, (1, 1))
        deadline = time.monotonic() + 120
        while (tmp_path / LOCK).stat().st_mtime < 9:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert left(tmp_path) == []


TAKES = """
import sys, time
from pathlib import Path
from gridformer.launch import run_lock
run_lock.REFRESH_S = 0.05
run_lock.RunLock().take(Path(sys.argv[1]))
print("taken", flush=True)
"""
LOSES = f"{TAKES}time.sleep(60)"
ENDS = f"{TAKES}run_lock.end_process(3)"


@pytest.mark.full
def test_a_process_that_has_lost_its_lock_ends(tmp_path: Path) -> None:
    words = [sys.executable, "-c", LOSES, str(tmp_path)]
    with subprocess.Popen(words, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "taken\n"
        theirs = written(tmp_path, host="elsewhere", machine="elsewhere").read_text()
        _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "lock was taken by process" in told
    assert (tmp_path / LOCK).read_text() == theirs


@pytest.mark.full
def test_it_is_given_back_when_a_process_is_ended_by_force(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ENDS, str(tmp_path)], timeout=60, check=False)
    assert done.returncode == 3
    assert left(tmp_path) == []
