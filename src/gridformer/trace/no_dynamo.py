"""Keeps torch's compiler from being loaded, which takes longer than many a trace.

Every optimizer and torch's own fake tensors import `torch._dynamo`, only to say that they are not
to be compiled. Inside `without_dynamo` they get a stand-in that agrees.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_NAME = "torch._dynamo"
_NOTE = "__dynamo_disable"  # where torch keeps what `disable` has returned


class _StandIn(ModuleType):
    """Takes the place of `torch._dynamo`. Whatever it does not know loads the real one."""

    def __init__(self) -> None:
        super().__init__(_NAME)
        self.__path__ = [str(Path(torch.__file__).parent / "_dynamo")]
        self.seen: list[Callable[..., Any]] = []

    def graph_break(self, msg: str = "") -> None:
        """There is no graph to break."""

    def disable(self, fn: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        """Returns a function that is not compiled."""
        self.seen.append(fn)
        return fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "config":  # its settings, which need nothing else of it
            return import_module(f"{_NAME}.config")
        self.remove()
        return getattr(import_module(_NAME), name)

    def remove(self) -> None:
        """Makes the next import load the real one."""
        if sys.modules.get(_NAME) is self:
            for name in [name for name in sys.modules if name.startswith(f"{_NAME}.")]:
                del sys.modules[name]
            del sys.modules[_NAME]
        for fn in self.seen:
            vars(fn).pop(_NOTE, None)


@contextmanager
def without_dynamo() -> Iterator[None]:
    """Does without `torch._dynamo` inside the context, unless it is already loaded."""
    if _NAME in sys.modules:
        yield
        return
    stand_in = sys.modules[_NAME] = _StandIn()
    try:
        yield
    finally:
        stand_in.remove()
