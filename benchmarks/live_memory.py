"""Bytes of all tensors alive while a piece of code runs, and their peak.

    with LiveMemory(model_parameters) as memory:
        y = forward()
        memory.live()                   # bytes now
    memory.peak                         # the most there were after any operation

Storages are counted, not tensors: views share one. A storage is seen when an operation reads or
writes it, and it lives as long as any tensor, the autograd graph or a message in flight holds it.
Its size is read anew after every operation, because FSDP2 frees and allocates by resizing. What an
operation allocates and frees within itself (workspace of a kernel, buffers of gloo) is not seen.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves

from benchmarks.variants import Built


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that hold the data of a tensor: of a DTensor, its local one."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        inner = getattr(tensor, name)
        if isinstance(inner, Tensor):  # a DTensor names its mesh too
            yield from plain_tensors(inner)


def n_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind some tensors."""
    storages = [t.untyped_storage() for tensor in tensors for t in plain_tensors(tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class LiveMemory(TorchDispatchMode):
    """See the module's text. `known` are tensors that are alive from the beginning."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in known:
            for plain in plain_tensors(tensor):
                self._see(plain)
        self.live()

    def live(self) -> int:
        """Bytes alive now."""
        now = 0
        for key, ref in list(self._storages.items()):
            storage = ref()
            if storage is None:
                del self._storages[key]
            else:
                now += storage.nbytes()
        self.peak = max(self.peak, now)
        return now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(t) for t in types):
            return NotImplemented  # a DTensor: come again with the local tensors it works on
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, Tensor) and not is_traceable_wrapper_subclass(leaf):
                self._see(leaf)
        self.live()
        return out

    def _see(self, tensor: Tensor) -> None:
        if tensor.device.type == "meta":
            return
        # The Python object of a storage is kept by torch for as long as the storage lives, so its
        # id names the storage and a weak reference tells of its end.
        storage = tensor.untyped_storage()
        known = self._storages.get(id(storage))
        if known is None or known() is not storage:
            self._storages[id(storage)] = weakref.ref(storage)


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


def measure(built: Built) -> Live:
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
