"""A context that logs when every tensor's memory is allocated and freed, and reads the log."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from gridformer.record.tracker import MemoryTracker


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

    def live(self) -> int:
        """Return the bytes held now."""
        return sum(self.live_by_kind().values())

    def curve(self) -> NDArray[np.int64]:
        """Return the bytes at each time: [times]."""
        found = np.zeros(self.now + 1, dtype=np.int64)
        for entry in self.entries:
            found[entry.born] += entry.n_bytes
            if entry.died is not None:
                found[entry.died] -= entry.n_bytes
        return found.cumsum()

    def peak(self) -> tuple[int, int]:
        """Return (time, bytes) of the moment with the most bytes."""
        curve = self.curve()
        when = int(curve.argmax())
        return when, int(curve[when])
