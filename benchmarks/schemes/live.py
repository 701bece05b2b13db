"""Live memory of one variant: what its parameters, its gradients and a step of it hold."""

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
    """Bytes of one rank and the whole stack.

    parameters, gradients: what this rank holds of them between steps.
    kept: added by the forward pass and still alive after it. The stack's output is among it, as the
        next layer's input would be.
    workspace: buffers that stay from one step to the next.
    peak: the most alive at once during forward and backward, everything included.
    """

    parameters: int = 0
    gradients: int = 0
    kept: int = 0
    workspace: int = 0
    peak: int = 0


def measure_live(built: Built) -> Live:
    """Two forwards and backwards of a variant, watched. Needs one earlier, unwatched pass."""
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
    """What lies in reference cycles would go at a moment of chance. Here it goes at the end."""
    gc.collect()
    gc.freeze()  # what is here now stays; collecting again need not look at it
    gc.disable()
    yield
    gc.enable()


def _settled(memory: LiveMemory) -> int:
    """Bytes alive when the threads of gloo have let go of the last messages."""
    time.sleep(0.05)
    gc.collect()
    return memory.live()
