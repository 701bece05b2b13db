"""Logs when every tensor's memory is allocated and freed while code runs.

It counts storages, not tensors, because views share one. A storage is born when an operation makes
it and dies when nothing holds it: no tensor, no autograd graph, no message in flight. Memory that
an operation allocates and frees within itself (a kernel's workspace, buffers of gloo) is not seen,
nor what an allocator adds by rounding up.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gridformer.record.events import Held
from gridformer.utils import tensors
from gridformer.utils.torch_private import in_backward


@dataclass(slots=True)
class Entry:
    """One storage.

    Attributes:
        n_bytes: Its size.
        place: What was running when it was made.
        kind: What it is, if `MemoryTracker.mark` was told.
        in_backward: Whether it was made in a backward pass.
        until_backward: Whether it was made before a backward pass and freed in one, so that it was
            kept for it.
    """

    n_bytes: int
    place: str
    kind: str = ""
    in_backward: bool = False
    until_backward: bool = False


class MemoryTracker:
    """Keeps the log. A dispatch mode calls `see`, and the code that is watched sets `place`.

    Args:
        device: The type of device whose memory counts; None counts every one with memory.

    Attributes:
        place: Where storages are made now.
        log: The changes in order, each a `Held` with the entry in place of its kind.
    """

    def __init__(self, device: str | None = None) -> None:
        self._device = device
        self.log: list[Any] = []
        self.place = ""
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], Entry]] = {}

    def at(self, place: str) -> None:
        """Sets the place of storages made from now on."""
        self.place = place

    def mark(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Sets the kind of some tensors, and tracks them from now on."""
        for tensor in tensors:
            entry = self._see(tensor)
            if entry is not None:
                entry.kind = kind

    @contextmanager
    def resizes(self) -> Iterator[None]:
        """Follows storages that are resized in place, which no operator shows."""
        tensors.storage_listeners.append(self._resized)
        try:
            yield
        finally:
            tensors.storage_listeners.remove(self._resized)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        known = self._known.get(id(storage))
        if known is None or known[0]() is not storage:
            return
        ref, entry = known
        if storage.nbytes() != entry.n_bytes:
            self._end(entry)
            self._known[id(storage)] = ref, self._begin(storage.nbytes(), entry.kind)

    def see(self, args: Iterable[Any], kwargs: dict[str, Any], out: Any) -> None:
        """Adds the storages of an operation to the log that are not there yet."""
        self._see_all(args)
        if kwargs:
            self._see_all(kwargs.values())
        self._see_all((out,))

    def _see_all(self, values: Iterable[Any]) -> None:
        for x in values:
            if isinstance(x, Tensor):
                self._see(x)
            elif isinstance(x, list | tuple):
                self._see_all(x)

    def _see(self, tensor: Tensor) -> Entry | None:
        # Torch keeps the Python object of a storage for as long as the storage lives, so the id
        # identifies the storage and a weak reference reports its end.
        storage = tensor.untyped_storage()
        key = id(storage)
        known = self._known.get(key)
        if known is not None and known[0]() is storage:
            return known[1]
        kind = tensor.device.type
        # A tensor on `meta` is a placeholder for one that another device has.
        if kind == "meta" or (self._device is not None and kind != self._device):
            return None
        entry = self._begin(storage.nbytes())

        def ended(_: Any) -> None:
            known = self._known.get(key)
            if known is not None and known[0] is ref:
                self._end(known[1])
                del self._known[key]

        ref = weakref.ref(storage, ended)
        self._known[key] = ref, entry
        return entry

    def _begin(self, n_bytes: int, kind: str = "") -> Entry:
        entry = Entry(n_bytes, self.place, kind, in_backward())
        if n_bytes:
            self.log.append(Held(n_bytes, entry, self.place))
        return entry

    def _end(self, entry: Entry) -> None:
        entry.until_backward = in_backward() and not entry.in_backward
        if entry.n_bytes:
            self.log.append(Held(-entry.n_bytes, entry, self.place))

    def live_by_kind(self) -> dict[str, int]:
        """Returns the bytes held now by kind."""
        held = Counter[str]()
        for change in self.log:
            held[change.kind.kind] += change.n_bytes
        return {kind: n_bytes for kind, n_bytes in held.items() if n_bytes}
