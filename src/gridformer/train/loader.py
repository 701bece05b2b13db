"""Makes the batches of the next steps in a background thread while the device computes.

Reading and copying release Python's lock, so a thread is enough, and a child process would outlive
a worker that is killed. A batch depends only on (seed, step, row), so nothing about batches that
are made ahead has to be saved in a checkpoint.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from queue import SimpleQueue
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gridformer.data import Batches
from gridformer.data.samples.order import Rows
from gridformer.data.samples.sample import Arrays
from gridformer.utils.batch import Batch

DEPTH = 2  # batches that are made ahead: one to take, and one that evens out slow reads
# A run that fails must report it soon, even if the thread waits for a slow disk.
_CLOSE_S = 1.0


class BatchLoader:
    """The batches of some steps, made ahead in their order by a thread.

    The thread starts at once. It ends after the last step, after an error and on `close`, so use
    the loader in a `with` statement.

    Args:
        batches: The global batches.
        rows: The rows of each global batch that this device reads.
        steps: The numbers of the batches, in the order in which they will be read.
        device: Where the batches are needed.
        depth: How many batches are made ahead at most.

    Attributes:
        waited: Start and end of the time for which the last `read` waited for its batch, in seconds
            of `time.perf_counter`.
    """

    def __init__(
        self,
        batches: Batches,
        rows: NDArray[np.int64],
        steps: Sequence[int],
        device: torch.device,
        depth: int = DEPTH,
    ) -> None:
        self.batches, self.rows, self.steps = batches, rows, steps
        self.waited = (0.0, 0.0)
        on_gpu = device.type == "cuda"
        self._transfer = ToGpu(device, depth + 1) if on_gpu else Transfer()
        self._made: SimpleQueue[tuple[int, Batch | BaseException | None]] = SimpleQueue()
        self._free = threading.Semaphore(depth)  # how many more may be made
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._thread.start()

    def read(self, step: int, rows: Rows) -> Batch:
        """Returns the batch of a step on the device and waits until it has been made.

        Raises:
            Exception: The error that was raised while the batch was made, with the traceback of the
                thread.
        """
        assert rows is self.rows, "the loader makes other rows"
        began = time.perf_counter()
        number, made = self._made.get()
        self.waited = (began, time.perf_counter())
        self._free.release()
        assert made is not None, f"no batch is left for step {step}"
        assert number == step, f"the next batch is that of step {number}, not {step}"
        if isinstance(made, BaseException):
            try:
                raise made
            finally:
                del made  # its traceback refers to this frame
        return self._transfer.to_device(made)

    def close(self) -> None:
        """Ends the thread. If it is making a batch, it ends after that one."""
        self._closed = True
        self._free.release()
        self._thread.join(_CLOSE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        for step in self.steps:
            self._free.acquire()
            if self._closed:
                return
            try:
                batch = self._transfer.from_host(self.batches.batch(step, self.rows))
            except BaseException as error:
                self._made.put((step, error))
                break
            self._made.put((step, batch))
        self._made.put((-1, None))


class Transfer:
    """Moves batches from numpy arrays to a device: to the CPU, where the arrays are tensors."""

    def from_host(self, arrays: Arrays) -> Batch:
        """Puts a batch where `to_device` finds it. Called by the thread that makes batches."""
        return {key: torch.from_numpy(value) for key, value in arrays.items()}

    def to_device(self, batch: Batch) -> Batch:
        """Returns a batch of `from_host` on the device. Called by the training thread, in order."""
        return batch


@dataclass
class PinnedBuffer:
    """Pinned memory for one batch, from which a GPU copies without the CPU."""

    # The tensors; empty until the first batch determines their shapes
    batch: Batch = field(default_factory=dict)
    copied: torch.cuda.Event | None = None  # passes when the last copy from the buffer is done

    def fill(self, arrays: Arrays) -> None:
        """Copies arrays into the buffer once the GPU has read what was there before."""
        if self.copied is not None:
            self.copied.synchronize()
        if not self.batch:
            self.batch = {key: pinned_like(value) for key, value in arrays.items()}
        for key, value in arrays.items():
            # With numpy: torch would start a second set of OpenMP threads for this thread.
            np.copyto(self.batch[key].numpy(), value)


def pinned_like(array: NDArray[np.generic]) -> Tensor:
    """Returns an uninitialized tensor in pinned memory, with the shape and dtype of an array."""
    return torch.empty_like(torch.from_numpy(array), pin_memory=True)


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream of all copies to a device: each stream would cache memory of its own."""
    return torch.cuda.Stream(device)


class ToGpu(Transfer):
    """The transfer to a GPU, through buffers in pinned memory that are used in turn.

    Copies run on a stream of their own, so that they do not wait for the kernels of the step
    before. At most `n_buffers` batches, counting the batch in the making, may wait for
    `to_device`. So when a buffer is filled again, the copy of its previous batch has started.
    """

    def __init__(self, device: torch.device, n_buffers: int) -> None:
        self.device = device
        self.stream = copy_stream(device)
        self.buffers = [PinnedBuffer() for _ in range(n_buffers)]
        self._filled = self._copied = 0  # how many batches; each thread changes one of them

    def from_host(self, arrays: Arrays) -> Batch:
        torch.cuda.set_device(self.device)  # each thread has its own current device
        buffer = self.buffers[self._filled % len(self.buffers)]
        buffer.fill(arrays)
        self._filled += 1
        return buffer.batch

    def to_device(self, batch: Batch) -> Batch:
        buffer = self.buffers[self._copied % len(self.buffers)]
        assert batch is buffer.batch, "batches are copied in the order in which they were made"
        training = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self.stream):
            on_gpu = {key: x.to(self.device, non_blocking=True) for key, x in batch.items()}
            buffer.copied = self.stream.record_event()
        training.wait_event(buffer.copied)
        for tensor in on_gpu.values():
            tensor.record_stream(training)  # its memory belongs to the other stream
        self._copied += 1
        return on_gpu
