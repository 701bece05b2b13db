"""A placeholder for a module that takes long to load, until more of it is needed."""

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

DYNAMO = "torch._dynamo"
_CONFIG = f"{DYNAMO}.config"  # its settings, which need nothing else of it
_NOTE = "__dynamo_disable"  # where torch keeps what `disable` has returned


class PlaceholderModule(ModuleType):
    """A placeholder for a package or a module.

    Args:
        name: The name of the module.
        path: Where the parts of a package lie; empty for a module without parts.
        alone: Parts that need nothing of the package, which are loaded without it.
    """

    def __init__(self, name: str, path: str = "", alone: tuple[str, ...] = ()) -> None:
        super().__init__(name)
        self.alone = alone
        if path:
            self.__path__ = [path]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        part = f"{self.__name__}.{name}"
        if part in self.alone:
            return import_module(part)
        return getattr(self.real(), name)

    def real(self, part: str = "") -> ModuleType:
        """Loads the real module, or a part of it. A trace does not see tensors that this makes."""
        from gridformer.utils.torch_private import without_modes

        self.remove()
        with without_modes():
            return import_module(part or self.__name__)

    def remove(self) -> None:
        """Makes the next import load the real one, which takes over what was loaded alone."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]


class _Parts(MetaPathFinder, Loader):
    """Loads the real package when a part of it is imported."""

    def __init__(self, placeholder: PlaceholderModule) -> None:
        self.placeholder = placeholder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package = self.placeholder.__name__
        mine = sys.modules.get(package) is self.placeholder and name.startswith(f"{package}.")
        if not mine or name in self.placeholder.alone:
            return None
        self.placeholder.real(name)
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing, because the module has been executed already."""


@contextmanager
def substituted(placeholder: PlaceholderModule) -> Iterator[None]:
    """Makes imports inside the context find a placeholder, unless the real module is loaded."""
    if placeholder.__name__ in sys.modules:
        yield
        return
    sys.modules[placeholder.__name__] = placeholder
    sys.meta_path.insert(0, parts := _Parts(placeholder))
    try:
        yield
    finally:
        sys.meta_path.remove(parts)
        placeholder.remove()


class _Dynamo(PlaceholderModule):
    """A placeholder for `torch._dynamo`."""

    def __init__(self) -> None:
        import torch

        path = str(Path(torch.__file__).parent / "_dynamo")
        super().__init__(DYNAMO, path, alone=(_CONFIG,))
        self.noted: list[Callable[..., Any]] = []

    def graph_break(self, msg: str = "") -> None:
        """There is no graph to break."""

    def disable(self, fn: Any = None, *args: Any, wrapping: bool = True, **kwargs: Any) -> Any:
        """Returns one of torch's functions as it is, and lets torch ask again after the context.

        Functions that others exclude from compilation get the real answer, because they keep it.
        """
        if not wrapping:
            self.noted.append(fn)
        elif not getattr(fn, "__module__", "").startswith("torch."):
            return self.real().disable(fn, *args, **kwargs)
        return fn

    def remove(self) -> None:
        super().remove()
        for fn in self.noted:
            vars(fn).pop(_NOTE, None)
        self.noted.clear()


@contextmanager
def without_dynamo() -> Iterator[None]:
    """Replaces `torch._dynamo` by a placeholder inside the context, unless it is already loaded.

    Join the process group before entering it, because torch then looks which modules are loaded.
    """
    with substituted(_Dynamo()):
        yield
