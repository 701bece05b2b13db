"""The pool itself: what it returns, and that no failure of a rank can hang a test."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.multirank.pool import RankFailed, WorkerPool, group_cache


def total(value: float) -> float:
    x = torch.tensor([value * (dist.get_rank() + 1)])
    dist.all_reduce(x)
    return x.item()


def ranked(prefix: str, *, suffix: str = "") -> str:
    return f"{prefix}{dist.get_rank()}/{dist.get_world_size()}{suffix}"


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("the root cause")
    dist.barrier()


def kill_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(900)


def count_in_cache() -> int:
    group_cache()["calls"] = group_cache().get("calls", 0) + 1
    return int(group_cache()["calls"])


def make_a_subgroup() -> int:
    """Make a subgroup, and return this rank's number of threads afterward."""
    group = dist.new_group()
    dist.barrier(group)
    return len(os.listdir("/proc/self/task"))


def random_number() -> float:
    return torch.rand(()).item()


def threads_and_pid() -> tuple[int, int]:
    return torch.get_num_threads(), os.getpid()


def unpicklable() -> object:
    return lambda: None


def test_results_in_rank_order(pool: WorkerPool) -> None:
    assert pool.run(3, ranked, "r", suffix="!") == ["r0/3!", "r1/3!", "r2/3!"]


def test_world_size_changes(pool: WorkerPool) -> None:
    for size in (2, 4, 1, 4, 3):
        assert pool.run(size, total, 1.0) == [size * (size + 1) / 2] * size


def test_processes_and_group_are_kept(pool: WorkerPool) -> None:
    pool.run(1, total, 1.0)  # replaces any group of two
    first = pool.run(2, threads_and_pid)
    assert first == pool.run(2, threads_and_pid)
    assert [threads for threads, _ in first] == [1, 1]
    assert pool.run(2, count_in_cache) == [1, 1]
    assert pool.run(2, count_in_cache) == [2, 2]
    pool.run(1, total, 1.0)
    assert pool.run(2, count_in_cache) == [1, 1]


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_an_overused_group_is_replaced(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of the subgroups that tests made end with the group."""
    monkeypatch.setattr("tests.support.multirank.pool.GROUP_SERVES", 3 * 3)
    pool.run(2, ranked, "")
    pool.run(3, total, 1.0)  # another size makes a new group
    made = [pool.run(3, make_a_subgroup)[0] for _ in range(2)]
    fresh = [pool.run(3, make_a_subgroup)[0] for _ in range(3)]
    assert made[1] > made[0]
    assert fresh[0] <= made[0]
    assert fresh[2] > fresh[1] > fresh[0]


def test_random_state_is_reset(pool: WorkerPool) -> None:
    assert pool.run(2, random_number) == pool.run(2, random_number)


def test_exception(pool: WorkerPool) -> None:
    pool.run(4, total, 1.0)
    start = time.monotonic()
    with pytest.raises(
        RankFailed, match=r"(?s)on rank 2.*raise_on.*ValueError: the root cause"
    ) as e:
        pool.run(4, raise_on, 2)
    assert time.monotonic() - start < pool.timeout_s, "the others are not waited for"
    assert e.value.rank == 2
    assert pool.run(4, total, 1.0) == [10.0] * 4


def test_killed_rank(pool: WorkerPool) -> None:
    pool.run(4, total, 1.0)
    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 \(pid \d+\) died: killed by SIGKILL") as e:
        pool.run(4, kill_on, 1)
    assert time.monotonic() - start < pool.timeout_s, "the others are not waited for"
    assert e.value.rank == 1
    assert pool.run(4, total, 1.0) == [10.0] * 4


def test_killed_between_tests(pool: WorkerPool) -> None:
    pool.run(2, total, 1.0)
    kill_and_wait(pool.pids()[1])
    assert pool.run(2, total, 1.0) == [3.0] * 2


def kill_and_wait(pid: int) -> None:
    """Wait until the process is gone; on a busy machine this takes a while."""
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 120
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_hang_says_where(pool: WorkerPool) -> None:
    for limit in (2.0, 10.0, 60.0):  # on a busy machine the others may not be done, either
        pool.run(3, total, 1.0)
        with pool.limit(limit), pytest.raises(RankFailed, match=r"(?s)ranks .*in hang_on") as e:
            pool.run(3, hang_on, 1)
        if "ranks [1] did" in str(e.value):
            break
    assert "ranks [1] did not finish" in str(e.value)
    assert pool.run(3, total, 1.0) == [6.0] * 3


def test_unpicklable(pool: WorkerPool) -> None:
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        pool.run(2, lambda: None)
    with pytest.raises(RankFailed, match="pickle"):
        pool.run(2, unpicklable)
