"""The end of a process with its parent, the allocator's settings, threads, copies, stop signals."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from gridformer.utils import process, signals
from gridformer.utils.process import ALLOC_CONF, use_expandable_segments
from tests.support.commands import gridformer_alone, python_alone
from tests.support.launch.programs import Start, finish


@pytest.mark.parametrize(
    ("limit", "free"), [("4096", 3072), ("1000000", 8192), ("max", 8192), (None, 8192)]
)
def test_a_container_has_what_its_limit_leaves(
    limit: str | None, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {"meminfo": "MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable: 8 kB\n"}
    if limit:
        texts |= {"memory.max": f"{limit}\n", "memory.current": "1024\n"}

    def read_text(path: Path) -> str:
        if path.name not in texts:
            raise FileNotFoundError(path)
        return texts[path.name]

    monkeypatch.setattr(Path, "read_text", read_text)
    assert process.free_memory() == free


PROGRAM = """
import multiprocessing, os, signal, sys, time
from gridformer.utils.process import end_with_parent

def child():
    end_with_parent()
    print("ready", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    multiprocessing.get_context("fork").Process(target=child).start()
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_ends_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    # The pipe closes when both processes that hold it have ended: the child, too.
    rest, _ = parent.communicate("now\n", timeout=100)
    assert rest == ""
    assert parent.returncode == -9


NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def allocator_settings(monkeypatch: pytest.MonkeyPatch, **environ: str) -> dict[str, str]:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    use_expandable_segments()
    found = {name: os.environ[name] for name in NAMES if name in os.environ}
    monkeypatch.delenv(ALLOC_CONF, raising=False)  # it was set behind monkeypatch's back
    return found


def test_segments_grow_unless_the_user_has_other_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert allocator_settings(monkeypatch) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in NAMES:
        theirs = {name: "max_split_size_mb:128"}
        assert allocator_settings(monkeypatch, **theirs) == theirs
    monkeypatch.setattr(sys, "platform", "win32")
    assert allocator_settings(monkeypatch) == {}


# torch's Linux builds use GNU's OpenMP, which decides at load time how its threads will wait.
TELL = {"OMP_DISPLAY_ENV": "true"}
OPENMP = pytest.mark.skipif(sys.platform != "linux", reason="another OpenMP")


@OPENMP
@pytest.mark.parametrize(
    ("chosen", "policy"),
    [
        ({}, "PASSIVE"),
        pytest.param({"OMP_WAIT_POLICY": "active"}, "ACTIVE", marks=pytest.mark.full),
    ],
    ids=["ours", "the user's"],
)
def test_threads_sleep_while_they_wait(chosen: dict[str, str], policy: str) -> None:
    environ = {
        k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    }
    done = gridformer_alone("generate", "nowhere", env=environ | TELL | chosen)
    assert f"OMP_WAIT_POLICY = '{policy}'" in done.stderr, done.stderr


@OPENMP
def test_threads_of_workers_sleep_too(start: Start) -> None:
    """The server that workers are forked from loads torch, and prints this in the background."""
    code, _, err = finish(start("sums", 2, env=TELL))
    assert code == 0, err
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in err
    assert "OMP_WAIT_POLICY = 'ACTIVE'" not in err


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets this process be copied, whatever its threads and cores."""
    monkeypatch.setattr(process, "can_copy", lambda: True)
    monkeypatch.setattr(process, "n_cores", lambda: 2)


@pytest.mark.usefixtures("two_cores")
def test_a_copy_computes_every_second_piece_and_order_remains() -> None:
    def squares(some: Sequence[int]) -> list[tuple[int, int]]:
        return [(one * one, os.getpid()) for one in some]

    found = process.on_all_cores(squares, [1, 2, 3, 4, 5])
    assert [square for square, _ in found] == [1, 4, 9, 16, 25]
    assert [pid == os.getpid() for _, pid in found] == [True, False, True, False, True]
    assert process.on_all_cores(squares, []) == []


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize("ends", [1, 9])  # SIGKILL
def test_what_fails_in_a_copy_is_computed_here(ends: int) -> None:
    def only_here(some: Sequence[int]) -> list[int]:
        if process.is_copy() and ends == 9:
            os.kill(os.getpid(), ends)
        if process.is_copy():
            raise RuntimeError("a copy")
        return [2 * one for one in some]

    assert process.on_all_cores(only_here, [1, 2, 3]) == [2, 4, 6]
    if ends == 1:
        assert process.as_far_as([lambda: 1, lambda: only_here([2])], 60) == [1, [4]]


def test_nothing_is_copied_beside_other_threads() -> None:
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        assert not process.can_copy()
        assert process.on_all_cores(lambda some: [os.getpid()] * len(some), [1, 2]) == [
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
    assert process.as_far_as([lambda: 1, compute, wait], 0.2)[:2] == [1, None]
    assert process.as_far_as([wait], 0.2) == [1]
    assert process.as_far_as([lambda: 1], 0.0) == [None]
    assert process.as_far_as([lambda: 1, lambda: 2, lambda: 3], float("inf")) == [1, 2, 3]


@pytest.mark.usefixtures("two_cores")
def test_processor_time_counts_copies_that_have_ended_and_share_it() -> None:
    before, own = process.processor_s(), time.process_time()
    assert process.as_far_as([compute, compute], 0.4) == [None, None]
    assert 0.7 > process.processor_s() - before > 0.3 > time.process_time() - own


@pytest.mark.usefixtures("two_cores")
def test_large_results() -> None:
    """They are larger than a pipe, which a copy could not fill before this process reads it."""
    assert process.as_far_as([lambda: b"x" * 10_000_000], 60) == [b"x" * 10_000_000]


STUCK = """
import os, signal, threading, time
from gridformer.utils import signals

signals.install(signals.StopPolicy(grace_s=1.0))

def signal_again_and_again():
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(400):
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(3)

threading.Thread(target=signal_again_and_again, daemon=True).start()
time.sleep(600)
"""


def test_more_signals_give_no_more_time() -> None:
    """The grace period counts from the first signal, whose number also sets the exit code.

    A process that still runs after 400 signals, for 20 seconds or more, exits with code 3.
    """
    done = python_alone("-c", STUCK)
    assert done.returncode == 143, done.stderr
    assert done.stderr == "gridformer: SIGTERM, but the step did not end within 1 s: " + (
        "no new checkpoint\n"
    )


def test_saves_are_told_when_the_first_begins_and_the_last_ends() -> None:
    told: list[bool] = []
    stop = signals.install(signals.StopPolicy())
    try:
        stop.on_hold = told.append
        stop.hold()
        stop.hold()
        stop.release()
        assert told == [True]
        stop.release()
        assert told == [True, False]
    finally:
        stop.uninstall()


@pytest.mark.parametrize(
    ("signum", "again_after_s", "ended"),
    [(signal.SIGINT, 0.0, [130]), (signal.SIGINT, 60.0, []), (signal.SIGTERM, 0.0, [])],
)
def test_a_second_interrupt_ends_a_process_unless_it_is_the_first_passed_on(
    signum: signal.Signals, again_after_s: float, ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(signals, "end_process", codes.append)
    stop = signals.install(signals.StopPolicy(again_after_s=again_after_s))
    try:
        stop._arrived(signum)
        stop._arrived(signal.SIGTERM)
        assert codes == []
        stop._arrived(signum)
        assert codes == ended
    finally:
        stop.uninstall()
