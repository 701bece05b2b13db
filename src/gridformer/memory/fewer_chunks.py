"""Runs only a few chunks of a loss and of a mask of dropout, as the others hold as much memory.

Of a long sequence there are hundreds. The first one begins sums, the next ones add to them, and the
last one may be smaller. Values are then wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar
from unittest.mock import patch

from gridformer.models.blocks import dropout, loss

_FIRST = 3

T = TypeVar("T")


@contextmanager
def fewer_chunks() -> Iterator[None]:
    """Lets losses and masks have only their first chunks and the last one, inside the context."""
    real = dropout.each_part

    def each_part(n: int, size: int) -> Sequence[slice]:
        return _first_and_last(real(n, size))

    with (
        patch.object(loss, "each_chunk", _first_and_last),
        patch.object(dropout, "each_part", each_part),
    ):
        yield


def _first_and_last(chunks: Sequence[T]) -> Sequence[T]:
    return [*chunks[:_FIRST], chunks[-1]] if len(chunks) > _FIRST + 1 else chunks
