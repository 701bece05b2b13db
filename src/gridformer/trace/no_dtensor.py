"""Keeps torch.distributed.tensor from being loaded, which takes as long as a short trace.

For each tensor of a subclass torch asks whether it is a DTensor, and remembers the class of
DTensors from then on. So only processes that end with their traces get a placeholder here: one that
may use DTensors later must see the real ones.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from gridformer.utils.placeholder_module import PlaceholderModule, substituted
from gridformer.utils.short_lived import ends_with_its_work

_NAME = "torch.distributed.tensor"


class _Tensors(PlaceholderModule):
    """A placeholder for torch.distributed.tensor."""

    class DTensor:
        """The class of no tensor."""


@contextmanager
def without_dtensors() -> Iterator[None]:
    """Replaces DTensors by a placeholder inside the context, if the process ends with its work."""
    with ExitStack() as stack:
        if ends_with_its_work() and _NAME not in sys.modules:
            stack.enter_context(substituted(_Tensors(_NAME)))
        yield
