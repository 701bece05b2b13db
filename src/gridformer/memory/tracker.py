"""Who holds how many bytes, and when: a log of every tensor's memory while code runs.

Storages are counted, not tensors: views share one. A storage is born when an operation makes it,
and ends when nothing holds it: no tensor, no autograd graph, no message on its way. The same log is
kept of real tensors, which measures, and of fake ones, which estimates.

What an operation allocates and frees within itself (a kernel's workspace, buffers of gloo) is not
seen, nor what an allocator rounds up.
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
    """One storage. born, died: times, counted in changes of the log; died is None while it lives.

    place: what was going on when it was made. kind: what it is, where somebody said so.
    in_backward: it was made in a backward pass. until_backward: it was made before one and ended
    in it: it was kept for it.
    """

    n_bytes: int
    born: int
    place: str
    kind: str = ""
    died: int | None = None
    in_backward: bool = False
    until_backward: bool = False


class MemoryTracker(TorchDispatchMode):
    """Keeps the log while it is entered. `place` is set by whoever knows what goes on.

    Storages that are resized in place (a message's buffer is freed, a parameter is gathered again)
    pass no operator: while the log is kept, `UntypedStorage.resize_` tells it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.place = ""
        self.entries: list[Entry] = []
        self.places: list[tuple[int, str]] = []  # from when on
        self.now = 0
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], Entry]] = {}

    def at(self, place: str) -> None:
        """What is made from now on is made there."""
        self.place = place
        self.places.append((self.now, place))

    def mark(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Say what some tensors are, and know them from now on."""
        for tensor in tensors:
            entry = self._see(tensor)
            if entry is not None:
                entry.kind = kind

    def leave_out(self, tensors: Iterable[Tensor]) -> int:
        """Do not count some tensors, which are elsewhere; returns their bytes."""
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
        if tensor.device.type == "meta":  # a stand-in for what another device has
            return None
        # The Python object of a storage is kept by torch for as long as the storage lives, so its
        # id names the storage and a weak reference tells of its end.
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
        """Bytes now."""
        return sum(entry.n_bytes for entry in self.entries if entry.died is None)

    def curve(self) -> list[tuple[int, int]]:
        """(time, bytes from then on) for every change."""
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
        """When there were most bytes, and how many."""
        return max(self.curve(), key=lambda point: point[1], default=(0, 0))

    def alive_at(self, when: int) -> list[Entry]:
        return [
            entry
            for entry in self.entries
            if entry.born <= when and (entry.died is None or entry.died > when)
        ]

    def place_at(self, when: int) -> str:
        """What was going on."""
        found = ""
        for since, place in self.places:
            if since > when:
                break
            found = place
        return found
