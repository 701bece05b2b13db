"""Keeps torch's compiler from being loaded, which takes longer than many a trace.

Every optimizer and torch's own fake tensors import `torch._dynamo`, only to say that they are not
to be compiled. Inside `without_dynamo` they get a stand-in that agrees. Whoever needs more of it
gets the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gridformer.trace.stand_in import StandIn, in_place

_NAME = "torch._dynamo"
_CONFIG = f"{_NAME}.config"  # its settings, which need nothing else of it
_NOTE = "__dynamo_disable"  # where torch keeps what `disable` has returned


class _Dynamo(StandIn):
    """Takes the place of `torch._dynamo`."""

    def __init__(self) -> None:
        path = str(Path(torch.__file__).parent / "_dynamo")
        super().__init__(_NAME, path, alone=(_CONFIG,))
        self.seen: list[Callable[..., Any]] = []

    def graph_break(self, msg: str = "") -> None:
        """There is no graph to break."""

    def disable(self, fn: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        """Returns a function that is not compiled."""
        self.seen.append(fn)
        return fn

    def remove(self) -> None:
        super().remove()
        for fn in self.seen:
            vars(fn).pop(_NOTE, None)


@contextmanager
def without_dynamo() -> Iterator[None]:
    """Does without `torch._dynamo` inside the context, unless it is already loaded."""
    with in_place(_Dynamo()):
        yield
