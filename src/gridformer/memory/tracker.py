"""Logs when every tensor's memory is allocated and freed while code runs.

It counts storages, not tensors, because views share one. A storage is born when an operation makes
it and dies when nothing holds it: no tensor, no autograd graph, no message in flight. The same log
serves real tensors, for measurements, and fake tensors, for estimates.

Memory that an operation allocates and frees within itself (a kernel's workspace, buffers of gloo)
is not seen, nor what an allocator adds by rounding up.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gridformer.models.blocks.recompute import in_backward


@dataclass
class Entry:
    """One storage.

    Attributes:
        n_bytes: Its size.
        born: The time at which it was made, counted in changes of the log.
        place: What was running when it was made.
        kind: What it is, if `MemoryTracker.mark` was told.
        died: The time at which it was freed; None while it lives.
        in_backward: Whether it was made in a backward pass.
        until_backward: Whether it was made before a backward pass and freed in one, so that it was
            kept for it.
    """

    n_bytes: int
    born: int
    place: str
    kind: str = ""
    died: int | None = None
    in_backward: bool = False
    until_backward: bool = False


class MemoryTracker(TorchDispatchMode):
    """A context manager that keeps the log. The code that it watches sets `place`.

    Storages that are resized in place (a message's buffer is freed, a parameter is gathered again)
    do not go through an operator, so inside the context `UntypedStorage.resize_` is patched.
    """

    def __init__(self) -> None:
        super().__init__()
        self.place = ""
        self.entries: list[Entry] = []
        self.places: list[tuple[int, str]] = []  # (begin, place)
        self.now = 0
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], Entry]] = {}

    def at(self, place: str) -> None:
        """Sets the place of storages made from now on."""
        self.place = place
        self.places.append((self.now, place))

    def mark(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Sets the kind of some tensors, and tracks them from now on."""
        for tensor in tensors:
            entry = self._see(tensor)
            if entry is not None:
                entry.kind = kind

    def leave_out(self, tensors: Iterable[Tensor]) -> int:
        """Stops counting some tensors, which a real run has elsewhere; returns their bytes."""
        n_bytes = 0
        for tensor in tensors:
            entry = self._see(tensor)
            if entry is not None:
                n_bytes, entry.n_bytes = n_bytes + entry.n_bytes, 0
        return n_bytes

    def __enter__(self) -> MemoryTracker:
        self._real_resize = resize = torch.UntypedStorage.resize_

        def resize_and_tell(storage: torch.UntypedStorage, n_bytes: int) -> Any:
            found = resize(storage, n_bytes)
            self._resized(storage)
            return found

        setattr(torch.UntypedStorage, "resize_", resize_and_tell)  # noqa: B010
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        setattr(torch.UntypedStorage, "resize_", self._real_resize)  # noqa: B010

    def _resized(self, storage: torch.UntypedStorage) -> None:
        known = self._known.get(id(storage))
        if known is None or known[0]() is not storage:
            return
        ref, entry = known
        if storage.nbytes() != entry.n_bytes:
            self._end(entry)
            self._known[id(storage)] = ref, self._entry(storage.nbytes(), entry.kind)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return out

    def _see(self, tensor: Tensor) -> Entry | None:
        if tensor.device.type == "meta":  # a placeholder for a tensor that another device has
            return None
        # Torch keeps the Python object of a storage for as long as the storage lives, so the id
        # identifies the storage and a weak reference reports its end.
        storage = tensor.untyped_storage()
        key = id(storage)
        known = self._known.get(key)
        if known is not None and known[0]() is storage:
            return known[1]
        entry = self._entry(storage.nbytes())

        def ended(_: Any) -> None:
            found = self._known.get(key)
            if found is not None and found[0] is ref:
                self._end(found[1])
                del self._known[key]

        ref = weakref.ref(storage, ended)
        self._known[key] = ref, entry
        return entry

    def _tick(self) -> int:
        self.now += 1
        return self.now

    def _entry(self, n_bytes: int, kind: str = "") -> Entry:
        entry = Entry(n_bytes, self._tick(), self.place, kind, in_backward=in_backward())
        self.entries.append(entry)
        return entry

    def _end(self, entry: Entry) -> None:
        entry.died = self._tick()
        entry.until_backward = in_backward() and not entry.in_backward

    # ------------------------------------------------------------------ reading the log

    def live(self) -> int:
        """Returns the bytes held now."""
        return sum(entry.n_bytes for entry in self.entries if entry.died is None)

    def curve(self) -> list[tuple[int, int]]:
        """Returns (time, bytes from then on) for every change."""
        changes: dict[int, int] = {}
        for entry in self.entries:
            changes[entry.born] = changes.get(entry.born, 0) + entry.n_bytes
            if entry.died is not None:
                changes[entry.died] = changes.get(entry.died, 0) - entry.n_bytes
        total, found = 0, []
        for when in sorted(changes):
            total += changes[when]
            found.append((when, total))
        return found

    def peak(self) -> tuple[int, int]:
        """Returns (time, bytes) of the moment with the most bytes."""
        return max(self.curve(), key=lambda point: point[1], default=(0, 0))

    def alive_at(self, when: int) -> list[Entry]:
        """Returns the storages that exist at a time."""
        return [
            entry
            for entry in self.entries
            if entry.born <= when and (entry.died is None or entry.died > when)
        ]

    def place_at(self, when: int) -> str:
        """Returns the place that was set at a time."""
        found = ""
        for since, place in self.places:
            if since > when:
                break
            found = place
        return found
