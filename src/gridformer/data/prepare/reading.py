"""Reads sources in batches, each with the place in the sources from which reading can go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from pydantic import Field

from gridformer.config import Config
from gridformer.data.prepare.place import ReadingPlace
from gridformer.data.prepare.sources import Source
from gridformer.data.prepare.text_chunks import TextChunk

# Large enough to keep the tokenizer's threads busy; its results take about 100 bytes per token.
BATCH_CHARS = 1 << 21
BATCH_ITEMS = 4096

Item = TypeVar("Item")
# Yields the items of a source after place.mark, and tells `place` of the marks that it passes. A
# source that cannot begin in the middle tells of none, and is read again up to where it stopped.
Reader = Callable[[Counter[str], ReadingPlace], Iterator[Item]]


class Position(Config):
    """A place in the sources: the number of items that have been read from `mark` on.

    Attributes:
        source: The number of the source.
        mark: What the source calls the mark; None is its beginning.
        items: The items that have been read since the mark.
        skipped: What had been left out of all sources at the mark.
    """

    source: int = 0
    mark: Any = None
    items: int = 0
    skipped: dict[str, int] = Field(default_factory=dict)


@runtime_checkable
class Resumable(Protocol):
    """A source of chunks that can begin in the middle."""

    def chunks_from(self, skipped: Counter[str], place: ReadingPlace) -> Iterator[TextChunk]:
        """See Reader."""


def chunk_reader(source: Source) -> Reader[TextChunk]:
    """Returns what reads the chunks of a source."""
    if isinstance(source, Resumable):
        return source.chunks_from
    return lambda skipped, place: source.chunks(skipped)


@dataclass(frozen=True)
class ItemBatch(Generic[Item]):
    """Some items of one source, and the place after them."""

    source: int
    items: list[Item]
    after: Position


def batches(
    readers: Sequence[Reader[Item]],
    chars: Callable[[Item], int],
    skipped: Counter[str],
    start: Position,
) -> Iterator[ItemBatch[Item]]:
    """Yields the items of all sources after `start`, in order.

    Args:
        readers: What reads each source.
        chars: Returns the characters of an item, which limit the size of a batch.
        skipped: Counts what is left out, and is set to what it was at `start`.
        start: Where to begin.
    """
    skipped.clear()
    skipped.update(start.skipped)
    for number in range(start.source, len(readers)):
        place, again = ReadingPlace(skipped=dict(skipped)), 0
        if number == start.source:
            place.mark, again = start.mark, start.items
        batch: list[Item] = []
        n_chars = 0
        for item in readers[number](skipped, place):
            place.items += 1
            if again:
                again -= 1
                continue
            batch.append(item)
            n_chars += chars(item)
            if n_chars >= BATCH_CHARS or len(batch) >= BATCH_ITEMS:
                yield ItemBatch(number, batch, _position(number, place))
                batch, n_chars = [], 0
        if batch:
            yield ItemBatch(number, batch, _position(number, place))


def _position(source: int, place: ReadingPlace) -> Position:
    return Position(source=source, mark=place.mark, items=place.items, skipped=dict(place.skipped))
