"""Batches made ahead: they are the same, errors come at their step, and no thread is left."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gridformer.data.samples.order import Rows
from gridformer.data.samples.sample import Arrays
from gridformer.train import loader as module
from gridformer.train.loader import BatchLoader, ToGpu

CPU = torch.device("cpu")
ROWS = np.array([1, 4, 5])


class Numbers:
    """Batches whose values are their step and rows; a step may raise or wait.

    Attributes:
        made: The steps that were asked for, in order.
    """

    n_samples = 100

    def __init__(self, **at: Callable[[], object]) -> None:
        self.made: list[int] = []
        self.at = at

    def batch(self, step: int, rows: Rows | None = None) -> Arrays:
        self.made.append(step)
        self.at.get(f"step_{step}", int)()
        assert isinstance(rows, np.ndarray)
        tokens = 100 * step + rows[:, None] * np.array([1, 1])
        return {"tokens": tokens, "valid": tokens % 3 == 0}


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name == "batches":
            thread.join(120.0)  # if a loader was closed while its thread was busy
            assert not thread.is_alive()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def same(got: dict[str, torch.Tensor], want: Arrays) -> bool:
    return got.keys() == want.keys() and all(
        np.array_equal(got[key].numpy(), want[key]) for key in want
    )


def test_batches_are_those_of_their_steps() -> None:
    batches = Numbers()
    with BatchLoader(batches, ROWS, range(3, 9), CPU) as loader:
        for step in range(3, 9):
            assert same(loader.read(step, ROWS), Numbers().batch(step, ROWS))
    assert batches.made == [*range(3, 9)], "each once, in order, and none after the last"


def test_the_wait_for_a_batch_is_timed() -> None:
    slow = threading.Event()
    batches = Numbers(step_1=slow.wait)
    with BatchLoader(batches, ROWS, range(3), CPU) as loader:
        loader.read(0, ROWS)
        threading.Timer(0.05, slow.set).start()
        began = time.perf_counter()
        loader.read(1, ROWS)
        waited_from, waited_to = loader.waited
        assert slow.is_set()
        assert began <= waited_from < waited_to <= time.perf_counter()
        assert waited_to - waited_from > 0.01
        wait_until(lambda: batches.made == [0, 1, 2] and not loader._made.empty())
        loader.read(2, ROWS)
        assert loader.waited[0] > waited_to, "the wait of the last read"


def test_few_batches_are_made_ahead() -> None:
    batches = Numbers()
    with BatchLoader(batches, ROWS, range(100), CPU, depth=3) as loader:
        wait_until(lambda: len(batches.made) == 3)
        time.sleep(0.05)
        assert len(batches.made) == 3
        loader.read(0, ROWS)
        wait_until(lambda: len(batches.made) == 4)
        time.sleep(0.05)
        assert len(batches.made) == 4
    assert not loader._thread.is_alive(), "closed long before the last step"


def test_an_error_is_raised_at_its_step_with_its_traceback() -> None:
    def damaged_file() -> None:
        raise OSError("no such page")

    batches = Numbers(step_2=damaged_file)
    with BatchLoader(batches, ROWS, range(9), CPU) as loader:
        loader.read(0, ROWS)
        wait_until(lambda: batches.made == [0, 1, 2])
        loader.read(1, ROWS)
        with pytest.raises(OSError, match="no such page") as error:
            loader.read(2, ROWS)
        loader._thread.join(120.0)
        assert not loader._thread.is_alive(), "it makes no more batches"
        with pytest.raises(AssertionError, match="no batch is left for step 3"):
            loader.read(3, ROWS)
    frames = traceback.extract_tb(error.value.__traceback__)
    assert frames[-1].name == "damaged_file"
    assert batches.made == [0, 1, 2]


def test_a_failing_run_does_not_wait_for_a_slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CLOSE_S", 0.01)
    disk = threading.Event()
    loader = BatchLoader(Numbers(step_1=lambda: disk.wait(60)), ROWS, range(9), CPU)
    loader.read(0, ROWS)
    loader.close()
    assert loader._thread.is_alive(), "it still reads"
    assert loader._thread.daemon, "it does not keep the process alive"
    disk.set()
    loader._thread.join(60.0)
    assert not loader._thread.is_alive(), "it has noticed that nobody wants the batch"


class Gpu:
    """A GPU that copies as late as possible: when somebody waits for the copy."""

    def __init__(self) -> None:
        self.pending: list[Callable[[], None]] = []
        self.waits = 0

    def run(self) -> None:
        while self.pending:
            self.pending.pop(0)()


class Pinned:
    """Memory of the host from which the GPU copies."""

    def __init__(self, array: NDArray[Any], gpu: Gpu) -> None:
        self.array, self.gpu = np.full_like(array, 0), gpu

    def numpy(self) -> NDArray[Any]:
        return self.array

    def to(self, device: torch.device, non_blocking: bool) -> OnGpu:
        assert non_blocking
        there = OnGpu()
        self.gpu.pending.append(lambda: there.copy(self.array))
        return there


class OnGpu:
    def __init__(self) -> None:
        self.recorded = False

    def copy(self, array: NDArray[Any]) -> None:
        self.array = array.copy()

    def record_stream(self, stream: object) -> None:
        self.recorded = True


class Event:
    """Marks a point in the order of copies."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def synchronize(self) -> None:
        self.gpu.waits += 1
        self.gpu.run()


class Stream:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.waited = gpu, 0

    def record_event(self) -> Event:
        return Event(self.gpu)

    def wait_event(self, event: Event) -> None:
        self.waited += 1

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_a_buffer_is_filled_again_only_after_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """All batches arrive unharmed on a GPU that delays its copies."""
    gpu = Gpu()
    copying, training = Stream(gpu), Stream(gpu)
    threads: dict[str, set[str]] = {}

    def noted(name: str, result: Any = None) -> Callable[..., Any]:
        def call(*_: Any) -> Any:
            threads.setdefault(name, set()).add(threading.current_thread().name)
            return result

        return call

    monkeypatch.setattr(module, "copy_stream", lambda device: copying)
    monkeypatch.setattr(torch.cuda, "current_stream", noted("stream", training))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "set_device", noted("device"))
    monkeypatch.setattr(module, "pinned_like", lambda array: Pinned(array, gpu))
    batches, depth, n = Numbers(), 2, 12
    found: list[Any] = []
    with BatchLoader(batches, ROWS, range(n), torch.device("cuda", 1), depth) as loader:
        transfer = loader._transfer
        assert isinstance(transfer, ToGpu)
        for step in range(n):
            found.append(loader.read(step, ROWS))
            wait_until(lambda: len(batches.made) >= min(n, len(found) + depth))
    gpu.run()
    for step, batch in enumerate(found):
        arrived = {key: torch.from_numpy(x.array) for key, x in batch.items()}
        assert same(arrived, Numbers().batch(step, ROWS))
        assert all(x.recorded for x in batch.values()), "its memory belongs to another stream"
    assert training.waited == n, "training waits for each copy"
    assert len(transfer.buffers) == depth + 1
    assert gpu.waits == n - len(transfer.buffers), "all buffers were used again and again"
    assert threads == {"device": {"batches"}, "stream": {threading.current_thread().name}}
