"""Loops whose turns all do the same, of which a record of a step needs only a few."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

_FEWEST = 5  # turns of a loop that is shortened
_marked: Callable[[int], Callable[[], None]] | None = None


def loop(items: Sequence[T]) -> Iterable[T]:
    """Returns the items of a loop; while a step is recorded, the first three and the last.

    The third turn stands for all but these. So each turn must do the same to memory and devices,
    except that the first ones begin sums and the last one may be smaller.
    """
    return items if _marked is None or len(items) < _FEWEST else _few(items, _marked)


def _few(items: Sequence[T], marked: Callable[[int], Callable[[], None]]) -> Iterator[T]:
    yield from items[:2]
    ends = marked(len(items) - 4)
    yield items[2]
    ends()
    yield items[-1]


@contextmanager
def recorded(mark: Callable[[int], Callable[[], Any]]) -> Iterator[None]:
    """Shortens loops inside the context.

    Args:
        mark: Is called when the third turn begins, with how many more turns it stands for, and
            returns what is to be called when it has ended.
    """
    global _marked
    before, _marked = _marked, mark
    try:
        yield
    finally:
        _marked = before
