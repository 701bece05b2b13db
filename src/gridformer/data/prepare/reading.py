"""Reads sources in batches, each with the place in the sources from which reading can go on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

# Large enough to keep the tokenizer's threads busy; its results take about 100 bytes per token.
BATCH_CHARS = 1 << 21
BATCH_ITEMS = 4096

Item = TypeVar("Item")


@dataclass
class Cursor:
    """Where the sources are being read, so that reading can go on there later.

    Attributes:
        source: The number of the source.
        mark: The last place that the source reported with `reached`; None is its beginning.
        items: The items that have been read since the mark.
        skipped: What had been left out of all sources at the mark.
    """

    source: int = 0
    mark: Any = None
    items: int = 0
    skipped: dict[str, int] = field(default_factory=dict)

    def reached(self, mark: object, skipped: Counter[str]) -> None:
        """Tells that the next item is the first one after `mark`, a value that JSON can hold."""
        self.mark, self.items, self.skipped = json.loads(json.dumps(mark)), 0, dict(skipped)


# Yields the items of a source after cursor.mark, and calls cursor.reached where it can begin. A
# source that cannot begin in the middle never does, and is read again up to where it stopped.
Reader = Callable[[Counter[str], Cursor], Iterator[Item]]


def batches(
    readers: Sequence[Reader[Item]],
    chars: Callable[[Item], int],
    skipped: Counter[str],
    start: Cursor,
) -> Iterator[tuple[list[Item], Cursor]]:
    """Yields the items of all sources after `start`, in order, and the place after each batch.

    Args:
        readers: What reads each source.
        chars: Returns the characters of an item, which limit the size of a batch.
        skipped: Counts what is left out, and is set to what it was at `start`.
        start: Where to begin.
    """
    skipped.clear()
    skipped.update(start.skipped)
    for number in range(start.source, len(readers)):
        cursor, again = Cursor(number, skipped=dict(skipped)), 0
        if number == start.source:
            cursor.mark, again = start.mark, start.items
        batch: list[Item] = []
        n_chars = 0
        for item in readers[number](skipped, cursor):
            cursor.items += 1
            if again:
                again -= 1
                continue
            batch.append(item)
            n_chars += chars(item)
            if n_chars >= BATCH_CHARS or len(batch) >= BATCH_ITEMS:
                yield batch, replace(cursor)
                batch, n_chars = [], 0
        if batch:
            yield batch, replace(cursor)
