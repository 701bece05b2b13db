"""Keeps torch's compiler from being loaded, which takes seconds, until something is compiled.

Every optimizer, `torch.utils.checkpoint` and torch's own fake tensors import `torch._dynamo`, only
to say that they are not to be compiled. Inside `without_dynamo` they get a placeholder that agrees.
Code that needs more of it, such as `torch.compile`, gets the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gridformer.utils.placeholder_module import PlaceholderModule, substituted

DYNAMO = "torch._dynamo"
_CONFIG = f"{DYNAMO}.config"  # its settings, which need nothing else of it
_NOTE = "__dynamo_disable"  # where torch keeps what `disable` has returned


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
        """Returns a function as it is if torch will ask again, which it does about its own.

        Without `wrapping` it notes the answer, and asks again when the note is gone. Functions that
        others exclude from compilation get the answer of the real one, because they keep it.
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
