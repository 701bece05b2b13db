"""Which layers of a model are built: a device of a pipeline builds only those that it runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_held: ContextVar[Collection[str] | None] = ContextVar("held layers", default=None)


@contextmanager
def only_layers(names: Collection[str]) -> Iterator[None]:
    """Builds models with these layers alone, inside the context. They are otherwise complete.

    Args:
        names: Names of layers within a model, such as `layers.3` or `decoder.layers.0`.
    """
    before = _held.set(names)
    try:
        yield
    finally:
        _held.reset(before)


def layer_numbers(stack: str, n: int) -> list[int]:
    """Returns the numbers of the layers of a stack that are built.

    Args:
        stack: The name of the stack within its model, such as `layers`.
        n: The number of layers of the stack.
    """
    held = _held.get()
    return [i for i in range(n) if held is None or f"{stack}.{i}" in held]
