"""Work in copies of this process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

import pytest

from gridformer.utils import process as fork_pool


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets this process be copied, whatever its threads and cores."""
    monkeypatch.setattr(fork_pool, "can_copy", lambda: True)
    monkeypatch.setattr(fork_pool, "n_cores", lambda: 2)


@pytest.mark.usefixtures("two_cores")
def test_a_copy_computes_every_second_piece_and_order_remains() -> None:
    def squares(some: Sequence[int]) -> list[tuple[int, int]]:
        return [(one * one, os.getpid()) for one in some]

    found = fork_pool.on_all_cores(squares, [1, 2, 3, 4, 5])
    assert [square for square, _ in found] == [1, 4, 9, 16, 25]
    assert [pid == os.getpid() for _, pid in found] == [True, False, True, False, True]
    assert fork_pool.on_all_cores(squares, []) == []


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize("ends", [1, 9])  # SIGKILL
def test_what_fails_in_a_copy_is_computed_here(ends: int) -> None:
    def only_here(some: Sequence[int]) -> list[int]:
        if fork_pool.is_copy() and ends == 9:
            os.kill(os.getpid(), ends)
        if fork_pool.is_copy():
            raise RuntimeError("a copy")
        return [2 * one for one in some]

    assert fork_pool.on_all_cores(only_here, [1, 2, 3]) == [2, 4, 6]


def test_nothing_is_copied_beside_other_threads() -> None:
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        assert not fork_pool.can_copy()
        assert fork_pool.on_all_cores(lambda some: [os.getpid()] * len(some), [1, 2]) == [
            os.getpid(),
            os.getpid(),
        ]
    finally:
        done.set()
        other.join()


def compute() -> int:
    while True:
        pass


def wait() -> int:
    time.sleep(0.5)
    return 1


@pytest.mark.usefixtures("two_cores")
def test_what_computes_too_long_is_stopped_and_what_waits_is_not() -> None:
    """Processor time counts, so what takes long because the machine is busy is not stopped."""
    assert fork_pool.as_far_as([lambda: 1, compute, wait], 0.2)[:2] == [1, None]
    assert fork_pool.as_far_as([wait], 0.2) == [1]
    assert fork_pool.as_far_as([lambda: 1], 0.0) == [None]
    assert fork_pool.as_far_as([lambda: 1, lambda: 2, lambda: 3], float("inf")) == [1, 2, 3]


def failing() -> int:
    raise ValueError(f"in a copy: {fork_pool.is_copy()}")


@pytest.mark.usefixtures("two_cores")
def test_what_fails_in_a_copy_that_does_several_pieces_is_done_here() -> None:
    with pytest.raises(ValueError, match="in a copy: False"):
        fork_pool.as_far_as([lambda: 1, failing, lambda: 2], float("inf"))


def test_processor_time_counts_copies_that_have_ended() -> None:
    before, own = fork_pool.processor_s(), time.process_time()
    assert fork_pool.as_far_as([compute], 0.3) == [None]
    assert fork_pool.processor_s() - before > 0.2 > time.process_time() - own


@pytest.mark.usefixtures("two_cores")
def test_large_results() -> None:
    """They are larger than a pipe, which a copy could not fill before this process reads it."""
    assert fork_pool.as_far_as([lambda: b"x" * 10_000_000], 60) == [b"x" * 10_000_000]
