"""Live memory of one variant: bytes of its parameters, its gradients and one step."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.common.live_memory import LiveMemory, n_bytes
from benchmarks.schemes.variants import Built


@dataclass(frozen=True)
class Live:
    """Bytes on one rank, for the whole stack.

    Attributes:
        parameters: Bytes of parameters that this rank holds between steps.
        gradients: Bytes of their gradients.
        kept: Bytes added by the forward pass that are still alive after it. They include the
            stack's output, as they would include the next layer's input.
        workspace: Bytes of buffers that stay from one step to the next.
        peak: The most bytes alive at once during forward and backward, everything included.
    """

    parameters: int = 0
    gradients: int = 0
    kept: int = 0
    workspace: int = 0
    peak: int = 0


def measure_live(built: Built) -> Live:
    """Watch two forwards and backwards of a variant, after an earlier unwatched pass."""
    built.clear()
    parameters = list(built.stack.parameters())
    with _no_collector(), LiveMemory([*parameters, built.x, built.g]) as memory:
        known = memory.live()
        built.backward(built.forward())
        built.clear()
        before = _settled(memory)
        memory.peak = before
        y = built.forward()
        after = _settled(memory)
        built.backward(y)
    gradients = n_bytes(p.grad for p in built.stack.parameters() if p.grad is not None)
    del y
    built.clear()
    return Live(n_bytes(parameters), gradients, after - before, before - known, memory.peak)


@contextmanager
def _no_collector() -> Iterator[None]:
    """Disable garbage collection; otherwise reference cycles would be freed at random moments."""
    gc.collect()
    gc.freeze()  # existing objects stay alive, so the collection at the end can skip them
    gc.disable()
    yield
    gc.enable()


def _settled(memory: LiveMemory) -> int:
    """Return the bytes alive once gloo's threads have released the last messages."""
    time.sleep(0.05)
    gc.collect()
    return memory.live()
