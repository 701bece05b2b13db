"""Logs when every tensor's memory is allocated and freed while code runs.

It counts storages, not tensors, because views share one. A storage is born when an operation makes
it and dies when nothing holds it: no tensor, no autograd graph, no message in flight. The same log
serves real tensors, for measurements, and fake tensors, for estimates.

Memory that an operation allocates and frees within itself (a kernel's workspace, buffers of gloo)
is not seen, nor what an allocator adds by rounding up.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gridformer.models.blocks.recompute import in_backward

_DEVICE = torch.ops.prim.device.default


@dataclass(slots=True)
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


class MemoryChange(NamedTuple):
    """A change of the log.

    Attributes:
        what: `begin` or `end` of a storage, `kind` that it got, or `at` a place that was set; also
            `gradient` before torch accumulates it, and `accumulated` after that.
        entry: The storage.
        text: The kind, the place, or the number of the parameter.
    """

    what: Literal["begin", "end", "kind", "at", "gradient", "accumulated"]
    entry: Entry | None
    text: str = ""


class MemoryTracker(TorchDispatchMode):
    """A context manager that keeps the log. The code that it watches sets `place`.

    Storages that are resized in place (a message's buffer is freed, a parameter is gathered again)
    do not go through an operator, so inside the context `UntypedStorage.resize_` is patched.

    Args:
        remembered: Returns the result of an operation without running it, or NotImplemented; see
            `gridformer.trace.fast_fake`.

    Attributes:
        place: Where storages are made now.
        entries: The storages, in the order in which they were made.
        places: The places that were set, each with the time from which on it held.
        now: The time.
        changes: All changes, in order.
        when_ended: Functions that are called when a storage ends, by the id of its entry.
    """

    def __init__(self, remembered: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self._remembered = remembered
        self._in_backward = in_backward
        self.place = ""
        self.entries: list[Entry] = []
        self.places: list[tuple[int, str]] = []  # (begin, place)
        self.now = 0
        self.changes: list[MemoryChange] = []
        self.when_ended: dict[int, Callable[[], None]] = {}
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], Entry]] = {}

    def at(self, place: str) -> None:
        """Sets the place of storages made from now on."""
        self.place = place
        self.places.append((self.now, place))
        self.changes.append(MemoryChange("at", None, place))

    def mark(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Sets the kind of some tensors, and tracks them from now on."""
        for tensor in tensors:
            entry = self._see(tensor)
            if entry is not None and entry.kind != kind:
                self.become(entry, kind)

    def become(self, entry: Entry, kind: str) -> None:
        """Sets the kind of a storage."""
        entry.kind = kind
        self.changes.append(MemoryChange("kind", entry, kind))

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
            self.end(entry)
            self._known[id(storage)] = ref, self.begin(storage.nbytes(), entry.kind)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE:  # torch asks fake tensors for it more often than for anything else
            return args[0].device
        kwargs = kwargs or {}
        out = self._remembered(func, args, kwargs) if self._remembered else NotImplemented
        if out is NotImplemented:
            out = func(*args, **kwargs)
        self._see_all(args)
        if kwargs:
            self._see_all(kwargs.values())
        self._see_all((out,))
        return out

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch.compile is not used here, and skipping it takes time in each operation

    def _see_all(self, found: Iterable[Any]) -> None:
        for x in found:
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
        if tensor.device.type == "meta":  # a placeholder for a tensor that another device has
            return None
        entry = self.begin(storage.nbytes())

        def ended(_: Any) -> None:
            found = self._known.get(key)
            if found is not None and found[0] is ref:
                self.end(found[1])
                del self._known[key]

        ref = weakref.ref(storage, ended)
        self._known[key] = ref, entry
        return entry

    def entry_of(self, tensor: Tensor) -> Entry | None:
        """Returns the entry of a tensor's storage, if the tensor was seen."""
        storage = tensor.untyped_storage()
        known = self._known.get(id(storage))
        return known[1] if known is not None and known[0]() is storage else None

    def begin(self, n_bytes: int, kind: str = "", backward: bool | None = None) -> Entry:
        """Adds a storage to the log.

        Args:
            n_bytes: Its size.
            kind: What it is.
            backward: Whether it is made in a backward pass; None if torch knows.
        """
        self.now += 1
        backward = self._in_backward() if backward is None else backward
        entry = Entry(n_bytes, self.now, self.place, kind, in_backward=backward)
        self.entries.append(entry)
        self.changes.append(MemoryChange("begin", entry, kind))
        return entry

    @contextmanager
    def playing_backward(self) -> Iterator[None]:
        """Makes the log count what happens inside the context as part of a backward pass."""
        self._in_backward = lambda: True
        try:
            yield
        finally:
            self._in_backward = in_backward

    def end(self, entry: Entry, until_backward: bool | None = None) -> None:
        """Ends a storage of the log.

        Args:
            entry: The storage.
            until_backward: See `Entry`; None if torch knows whether this is a backward pass.
        """
        self.now += 1
        entry.died = self.now
        if until_backward is None:
            until_backward = self._in_backward() and not entry.in_backward
        entry.until_backward = until_backward
        self.changes.append(MemoryChange("end", entry))
        told = self.when_ended.pop(id(entry), None)
        if told is not None:
            told()

    # ------------------------------------------------------------------ reading the log

    def live(self) -> int:
        """Returns the bytes held now."""
        return sum(entry.n_bytes for entry in self.entries if entry.died is None)

    def differences(self) -> NDArray[np.int64]:
        """Returns by how many bytes each time differs from the one before: [times]."""
        found = np.zeros(self.now + 1, dtype=np.int64)
        for entry in self.entries:
            found[entry.born] += entry.n_bytes
            if entry.died is not None:
                found[entry.died] -= entry.n_bytes
        return found

    def curve(self) -> NDArray[np.int64]:
        """Returns the bytes at each time: [times]."""
        return self.differences().cumsum()

    def peak(self) -> tuple[int, int]:
        """Returns (time, bytes) of the moment with the most bytes."""
        curve = self.curve()
        when = int(curve.argmax())
        return when, int(curve[when])

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
