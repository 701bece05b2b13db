"""Reads sources in batches, each with the place in the sources from which reading can go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

from pydantic import Field

from gridformer.config import Config
from gridformer.data.prepare.place import Place
from gridformer.data.prepare.sources import Source
from gridformer.data.prepare.text_chunks import Piece

# Large enough to keep the tokenizer's threads busy; its results take about 100 bytes per token.
BATCH_CHARS = 1 << 21
BATCH_PIECES = 4096


class Position(Config):
    """A place in the sources: from `mark` on, so many pieces have been read.

    Attributes:
        source: The number of the source.
        mark: What the source calls the mark; None is its beginning.
        pieces: The pieces that have been read since the mark.
        skipped: What had been left out of all sources at the mark.
    """

    source: int = 0
    mark: Any = None
    pieces: int = 0
    skipped: dict[str, int] = Field(default_factory=dict)


@runtime_checkable
class Resumable(Protocol):
    """A source that can begin in the middle. Others are read again up to where reading stopped."""

    def pieces_from(self, skipped: Counter[str], place: Place) -> Iterator[Piece]:
        """Yields the pieces after place.mark, and tells `place` of the marks that it passes."""


@dataclass(frozen=True)
class Batch:
    """Some pieces of one source, and the place after them."""

    source: int
    pieces: list[Piece]
    after: Position


def batches(sources: Sequence[Source], skipped: Counter[str], start: Position) -> Iterator[Batch]:
    """Yields the pieces of all sources after `start`, in order.

    Args:
        sources: The sources.
        skipped: Counts what is left out, and is set to what it was at `start`.
        start: Where to begin.
    """
    skipped.clear()
    skipped.update(start.skipped)
    for number in range(start.source, len(sources)):
        source = sources[number]
        place, again = Place(skipped=dict(skipped)), 0
        if number == start.source:
            place.mark, again = start.mark, start.pieces
        if isinstance(source, Resumable):
            pieces = cast(Resumable, source).pieces_from(skipped, place)
        else:
            pieces = source.pieces(skipped)
        batch: list[Piece] = []
        chars = 0
        for piece in pieces:
            place.pieces += 1
            if again:
                again -= 1
                continue
            batch.append(piece)
            chars += len(piece.text)
            if chars >= BATCH_CHARS or len(batch) >= BATCH_PIECES:
                yield Batch(number, batch, _position(number, place))
                batch, chars = [], 0
        if batch:
            yield Batch(number, batch, _position(number, place))


def _position(source: int, place: Place) -> Position:
    return Position(
        source=source, mark=place.mark, pieces=place.pieces, skipped=dict(place.skipped)
    )
