"""Copies of a rank's blocks in host memory, from which a file is written while training goes on."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from gridformer.checkpoint.blocks import TensorBlock

_ALIGNED = 64  # bytes


class Snapshot:
    """Memory for copies of blocks. It is kept from save to save, because it takes time to get.

    On a GPU the memory is pinned, and a stream of its own copies while the host goes on. The stream
    of the training waits for the copies on the GPU, so that an update cannot overwrite what is
    being copied.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pinned = False
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    def take(self, blocks: Mapping[str, TensorBlock]) -> dict[str, TensorBlock]:
        """Copies blocks. The copies may be read after `wait`, until the next call."""
        device = next((b.tensor.device for b in blocks.values() if b.tensor.is_cuda), None)
        self.reserve(bytes_of(blocks), device is not None)
        copies, begin = {}, 0
        for name, block in blocks.items():
            end = begin + block.n_bytes
            copy = _like(block.tensor, self._memory[begin:end])
            copies[name] = TensorBlock(copy, block.size, block.offset)
            begin = _aligned(end)
        pairs = [(copies[name].tensor, block.tensor.detach()) for name, block in blocks.items()]
        if device is None:
            for copy, tensor in pairs:
                copy.copy_(tensor)
            return copies
        training = torch.cuda.current_stream(device)
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(training)
        with torch.cuda.stream(self._stream):
            for copy, tensor in pairs:
                copy.copy_(tensor, non_blocking=True)
            self._copied = self._stream.record_event()
        training.wait_stream(self._stream)
        return copies

    def wait(self) -> None:
        """Waits until the copies are complete. The thread that writes them calls it."""
        if self._copied is not None:
            assert self._stream is not None
            # A thread begins with GPU 0, on which every process would open a second context.
            with torch.cuda.device(self._stream.device):
                self._copied.synchronize()

    def close(self) -> None:
        """Frees the memory."""
        self._unpin()
        self._memory = torch.empty(0, dtype=torch.uint8)

    def __del__(self) -> None:
        # Memory that is freed while it is pinned could not be pinned again by its next owner.
        with contextlib.suppress(Exception):
            self._unpin()

    def reserve(self, n_bytes: int, pinned: bool) -> None:
        """Takes memory for copies, whose bytes `bytes_of` tells.

        Pinning it for a GPU takes seconds, in which nothing else runs on the GPU.
        """
        if self._memory.numel() >= n_bytes and self._pinned >= pinned:
            return
        self.close()
        self._memory = torch.empty(n_bytes, dtype=torch.uint8)
        if pinned:
            # Torch's own allocator of pinned memory rounds up to a power of two.
            runtime = torch.cuda.cudart()
            status = runtime.cudaHostRegister(self._memory.data_ptr(), n_bytes, 0)
            self._pinned = int(status) == 0  # otherwise copying is slower, but right
            if not self._pinned:
                with contextlib.suppress(RuntimeError):  # the next kernel would report the failure
                    torch.zeros(1, device="cuda")

    def _unpin(self) -> None:
        if self._pinned:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
            self._pinned = False


def bytes_of(blocks: Mapping[str, TensorBlock]) -> int:
    """Returns the bytes that copies of blocks take."""
    return sum(_aligned(block.n_bytes) for block in blocks.values())


def _aligned(n_bytes: int) -> int:
    return math.ceil(n_bytes / _ALIGNED) * _ALIGNED


def _like(tensor: Tensor, memory: Tensor) -> Tensor:
    """Returns bytes as a tensor of the same shape, transposed in memory if `tensor` is."""
    values = memory.view(tensor.dtype)
    if tensor.dim() == 2 and tensor.stride(0) < tensor.stride(1):
        return values.view(tensor.shape[1], tensor.shape[0]).t()
    return values.view(tensor.shape)
