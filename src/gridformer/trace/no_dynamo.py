"""Keeps torch's compiler from being loaded, which takes longer than many a trace.

Every optimizer and torch's own fake tensors import `torch._dynamo`, only to say that they are not
to be compiled. Inside `without_dynamo` they get a stand-in that agrees. Whoever needs more of it
gets the real one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

_NAME = "torch._dynamo"
_CONFIG = f"{_NAME}.config"  # its settings, which need nothing else of it
_NOTE = "__dynamo_disable"  # where torch keeps what `disable` has returned


class _StandIn(ModuleType):
    """Takes the place of `torch._dynamo`."""

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
        if name == "config":
            return import_module(_CONFIG)
        return getattr(self.real(_NAME), name)

    def real(self, name: str) -> ModuleType:
        """Loads the real one, or a part of it. A trace does not see tensors that this makes."""
        self.remove()
        with _disable_current_modes():
            return import_module(name)

    def remove(self) -> None:
        """Makes the next import load the real one."""
        if sys.modules.get(_NAME) is self:
            for name in (_NAME, _CONFIG):
                sys.modules.pop(name, None)
        for fn in self.seen:
            vars(fn).pop(_NOTE, None)


class _Parts(MetaPathFinder, Loader):
    """Loads the real one when a part of it is imported."""

    def __init__(self, stand_in: _StandIn) -> None:
        self.stand_in = stand_in

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        mine = sys.modules.get(_NAME) is self.stand_in
        if not mine or not name.startswith(f"{_NAME}.") or name == _CONFIG:
            return None
        self.stand_in.real(name)
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """It is executed already."""


@contextmanager
def without_dynamo() -> Iterator[None]:
    """Does without `torch._dynamo` inside the context, unless it is already loaded."""
    if _NAME in sys.modules:
        yield
        return
    stand_in = sys.modules[_NAME] = _StandIn()
    parts = _Parts(stand_in)
    sys.meta_path.insert(0, parts)
    try:
        yield
    finally:
        sys.meta_path.remove(parts)
        stand_in.remove()
