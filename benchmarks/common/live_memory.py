"""Counts the bytes of all tensors that are alive while a piece of code runs, and their peak.

    with LiveMemory(model_parameters) as memory:
        y = forward()
        memory.live()                   # bytes now
    memory.peak                         # the most after any operation

It counts storages, not tensors, because views share one. A storage is noticed when an operation
reads or writes it, and it lives as long as any tensor, the autograd graph or a message in flight
holds it. Its size is read again after every operation, because FSDP2 frees and allocates by
resizing. What an operation allocates and frees within itself (a kernel's workspace, gloo's buffers)
is not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that hold a tensor's data; for a DTensor, its local tensor."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        inner = getattr(tensor, name)
        if isinstance(inner, Tensor):  # a DTensor also names its mesh
            yield from plain_tensors(inner)


def n_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages behind some tensors."""
    storages = [t.untyped_storage() for tensor in tensors for t in plain_tensors(tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class LiveMemory(TorchDispatchMode):
    """Tracks live bytes inside a `with` block; see the module's docstring.

    Args:
        known: Tensors that are alive from the beginning.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in known:
            for plain in plain_tensors(tensor):
                self._see(plain)
        self.live()

    def live(self) -> int:
        """Return the bytes that are alive now."""
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
            return NotImplemented  # a DTensor: torch calls again with the local tensors
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, Tensor) and not is_traceable_wrapper_subclass(leaf):
                self._see(leaf)
        self.live()
        return out

    def _see(self, tensor: Tensor) -> None:
        if tensor.device.type == "meta":
            return
        # torch keeps the Python object of a storage for as long as the storage lives, so its id
        # identifies the storage and a weak reference tells when it is freed.
        storage = tensor.untyped_storage()
        known = self._storages.get(id(storage))
        if known is None or known() is not storage:
            self._storages[id(storage)] = weakref.ref(storage)
