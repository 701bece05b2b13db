"""Turning off the search for circular garbage, which takes time where there is hardly any."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection(ends: bool = False) -> Iterator[None]:
    """Turns off the search for circular garbage inside the context.

    Args:
        ends: Whether the process ends after the context. Then what exists at the end of the context
            is not searched later, either.
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
