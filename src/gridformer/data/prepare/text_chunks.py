"""Text on its way to the tokenizer: pieces of bounded size, so that no document must fit memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

PIECE_CHARS = 1 << 16
_LOOK_BACK = 1 << 12  # how far before the limit a seam is looked for; text without one is cut there
_SEAM = re.compile(r"\S(?=[ \n\r\t])")


class Piece(NamedTuple):
    """A part of a document; `ends` marks its last one. An empty document is one empty piece.

    In sources of pairs every second document is the other text of the one before. In labeled
    sources `label` is on all pieces.
    """

    text: str
    ends: bool
    label: str | None = None


def pieces(chunks: Iterable[str], limit: int = PIECE_CHARS) -> Iterator[Piece]:
    """One document, given in chunks of any size, as pieces of at most `limit` characters.

    Pieces end between a word and the white space after it. GPT-2's pre-tokenizer always splits
    there, so the tokens are those of the whole document. Where a stretch of 4096 characters has
    no such place the cut is anywhere, and up to one token more comes out.
    """
    held = ""
    for chunk in chunks:
        held += chunk
        done = 0
        while len(held) - done > limit:
            end = _seam(held, done, done + limit)
            yield Piece(held[done:end], False)
            done = end
        held = held[done:]
    yield Piece(held, True)


def labeled(parts: Iterable[Piece], label: str | None) -> Iterator[Piece]:
    """The same pieces, with a label."""
    return (part._replace(label=label) for part in parts)


def _seam(text: str, start: int, limit: int) -> int:
    """The last place in text[start:limit] to cut; text goes on after limit."""
    # A seam at the limit itself is seen because the look-ahead reads one character further.
    low = max(start, limit - _LOOK_BACK)
    *_, end = (limit, *(seam.end() for seam in _SEAM.finditer(text, low, limit + 1)))
    return end
