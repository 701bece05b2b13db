"""Keeps torch.distributed.tensor from being loaded, which takes as long as a short trace.

For each tensor of a subclass torch asks whether it is a DTensor, and remembers the class of
DTensors from then on. So only copies of a process, which end when their trace is done, get a
placeholder here: a process that may use DTensors later must see the real ones.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from gridformer.utils.beside import is_copy
from gridformer.utils.placeholder_module import PlaceholderModule, substituted

_NAME = "torch.distributed.tensor"


class _Tensors(PlaceholderModule):
    """A placeholder for torch.distributed.tensor."""

    class DTensor:
        """The class of no tensor."""


@contextmanager
def without_dtensors() -> Iterator[None]:
    """Replaces DTensors by a placeholder inside the context, in a process that is a copy."""
    with ExitStack() as stack:
        if is_copy() and _NAME not in sys.modules:
            stack.enter_context(substituted(_Tensors(_NAME)))
        yield
