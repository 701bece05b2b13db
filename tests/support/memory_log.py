"""A context that logs when every tensor's memory is allocated and freed, and reads the log."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from gridformer.record.tracker import Entry, MemoryTracker


class MemoryLog(MemoryTracker, TorchDispatchMode):
    """Keeps the log of what runs inside its context."""

    def __init__(self, device: str | None = None) -> None:
        TorchDispatchMode.__init__(self)
        MemoryTracker.__init__(self, device)
        self._stack = ExitStack()

    def __enter__(self) -> MemoryLog:
        self._stack.enter_context(self.resizes())
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._stack.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.see(args, kwargs, out)
        return out

    @property
    def entries(self) -> list[Entry]:
        """The storages with memory, in the order in which they were made."""
        return [change.kind for change in self.log if change.n_bytes > 0]

    def live(self) -> int:
        """Return the bytes held now."""
        return sum(self.live_by_kind().values())

    def curve(self, kind: str | None = None) -> NDArray[np.int64]:
        """Return the bytes after each change, of one kind or of all."""
        counts = [one.n_bytes for one in self.log if kind in (None, one.kind.kind)]
        return np.array([0, *counts], dtype=np.int64).cumsum()

    def peak(self, kind: str | None = None) -> int:
        """Return the most bytes at a time, of one kind or of all."""
        return int(self.curve(kind).max())
