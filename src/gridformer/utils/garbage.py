"""Turns off Python's cyclic garbage collector, which takes time even if there is no garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection(ends: bool = False) -> Iterator[None]:
    """Turns off the cyclic garbage collector inside the context.

    Args:
        ends: Whether the process ends after the context. Then objects that exist at the end of the
            context are not searched later, either.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if ends:
            gc.freeze()
        if was_enabled:
            gc.enable()
