"""Work in copies of this process."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Sequence

import pytest

from gridformer.utils import beside


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets this process be copied, whatever its threads and cores."""
    monkeypatch.setattr(beside, "can_copy", lambda: True)
    monkeypatch.setattr(beside, "n_cores", lambda: 2)


@pytest.mark.usefixtures("two_cores")
def test_a_copy_computes_every_second_piece_and_order_remains() -> None:
    def squares(some: Sequence[int]) -> list[tuple[int, int]]:
        return [(one * one, os.getpid()) for one in some]

    found = beside.on_all_cores(squares, [1, 2, 3, 4, 5])
    assert [square for square, _ in found] == [1, 4, 9, 16, 25]
    assert [pid == os.getpid() for _, pid in found] == [True, False, True, False, True]
    assert beside.on_all_cores(squares, []) == []


@pytest.mark.usefixtures("two_cores")
def test_what_fails_in_a_copy_is_computed_here() -> None:
    here = os.getpid()

    def only_here() -> int:
        if os.getpid() != here:
            raise RuntimeError("a copy")
        return 7

    assert beside.beside(only_here)() == 7


def test_nothing_is_copied_beside_other_threads() -> None:
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        assert not beside.can_copy()
        assert beside.beside(os.getpid)() == os.getpid()
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
    assert beside.as_far_as([lambda: 1, compute, wait], 0.2)[:2] == [1, None]
    assert beside.as_far_as([wait], 0.2) == [1]
    assert beside.as_far_as([lambda: 1], 0.0) == [None]
    assert beside.as_far_as([lambda: 1, lambda: 2, lambda: 3], float("inf")) == [1, 2, 3]


def failing() -> int:
    raise ValueError(f"in a copy: {beside.is_copy()}")


@pytest.mark.usefixtures("two_cores")
def test_what_fails_in_a_copy_that_does_several_pieces_is_done_here() -> None:
    with pytest.raises(ValueError, match="in a copy: False"):
        beside.as_far_as([lambda: 1, failing, lambda: 2], float("inf"))


def test_processor_time_counts_copies_that_have_ended() -> None:
    before, own = beside.processor_s(), time.process_time()
    assert beside.as_far_as([compute], 0.3) == [None]
    assert beside.processor_s() - before > 0.2 > time.process_time() - own


@pytest.mark.usefixtures("two_cores")
def test_a_copy_ends_before_anybody_reads_its_large_result() -> None:
    child = beside._Child(lambda: b"x" * 10_000_000)
    while not select.select([child.reader], [], [], 1)[0]:
        pass
    assert child.result() == b"x" * 10_000_000
