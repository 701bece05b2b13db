"""Work in copies of this process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

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


def test_processor_time_counts_copies_that_have_ended() -> None:
    before, own = beside.processor_s(), time.process_time()
    assert beside.as_far_as([compute], 0.3) == [None]
    assert beside.processor_s() - before > 0.2 > time.process_time() - own


@pytest.mark.usefixtures("two_cores")
def test_copies_share_pieces_and_what_fails_there_is_computed_here() -> None:
    here = os.getpid()

    def piece(number: int) -> tuple[int, bool]:
        if number == 2 and os.getpid() != here:
            raise RuntimeError("a copy")
        time.sleep(0.5 if number == 0 else 0.0)
        return number, os.getpid() == here

    found = beside.shared([partial(piece, number) for number in range(6)])
    assert [number for number, _ in found] == [*range(6)]
    assert found[2][1], "it fails in copies"
    assert not found[0][1], "a copy works on while the other one fails"


@pytest.mark.usefixtures("two_cores")
def test_errors_of_shared_work_are_raised() -> None:
    def fails() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        beside.shared([fails, lambda: None])


@pytest.mark.usefixtures("two_cores")
def test_copies_share_more_pieces_than_a_byte_counts() -> None:
    assert beside.shared([partial(pow, number, 2) for number in range(600)]) == [
        number**2 for number in range(600)
    ]


def busy(begun: Path, goes_on: Path) -> int:
    """Create a file, wait for another one, and return the number of this process."""
    begun.touch()
    while not goes_on.exists():
        time.sleep(0.01)
    return os.getpid()


@pytest.mark.usefixtures("two_cores")
def test_work_is_begun_beside_this_process_which_helps_in_the_end(tmp_path: Path) -> None:
    begun, goes_on = tmp_path / "begun", tmp_path / "goes on"

    def first() -> int:
        return busy(begun, goes_on)

    def second() -> int:
        goes_on.touch()
        return os.getpid()

    results, _ = beside.started([first, second])
    while not begun.exists():
        time.sleep(0.01)
    there, here = results()
    assert there != os.getpid()
    assert here == os.getpid(), "the copy was busy"


@pytest.mark.usefixtures("two_cores")
def test_other_work_begins_beside_this_process_when_the_first_is_done(tmp_path: Path) -> None:
    ends, ended = tmp_path / "ends", tmp_path / "ended"

    def first() -> int:
        while not ends.exists():
            time.sleep(0.01)
        ended.touch()
        return 1

    def later() -> bool:
        return ended.exists()

    results, results_of_later = beside.started([first], then=[later])
    time.sleep(0.1)
    ends.touch()
    while not ended.exists():
        time.sleep(0.01)
    time.sleep(0.3)  # for the copy to take it before this process does
    assert results() == [1]
    assert results_of_later() == [True], "it waited for the first"


@pytest.mark.usefixtures("two_cores")
def test_this_process_does_other_work_while_copies_are_busy(tmp_path: Path) -> None:
    begun, goes_on = tmp_path / "begun", tmp_path / "goes on"

    def first() -> int:
        return busy(begun, goes_on)

    def later() -> int:
        goes_on.touch()  # before this, the copy does not end
        return os.getpid()

    results, results_of_later = beside.started([first], then=[later])
    while not begun.exists():
        time.sleep(0.01)
    assert results()[0] != os.getpid()
    assert results_of_later() == [os.getpid()]


@pytest.mark.usefixtures("two_cores")
def test_a_copy_ends_before_anybody_reads_its_large_result(tmp_path: Path) -> None:
    ended = tmp_path / "ended"

    def later() -> int:
        ended.touch()
        return os.getpid()

    results, results_of_later = beside.started([lambda: b"x" * 10_000_000], then=[later])
    while not ended.exists():
        time.sleep(0.01)
    assert results() == [b"x" * 10_000_000]
    assert results_of_later() != [os.getpid()]
