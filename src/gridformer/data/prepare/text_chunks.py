"""Splits documents into chunks of bounded size, so that no document must fit into memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

CHUNK_CHARS = 1 << 16
_LOOK_BACK = 1 << 12  # characters before the limit in which to look for a place to cut
_SEAM = re.compile(r"\S(?=[ \n\r\t])")


class TextChunk(NamedTuple):
    """A part of a document. An empty document is one empty chunk.

    In sources of pairs, documents alternate between the first and the second text of a pair.

    Attributes:
        text: The text.
        ends: Whether it is the last chunk of its document.
        label: The label of the document, on all of its chunks, in labeled sources.
    """

    text: str
    ends: bool
    label: str | None = None


def text_chunks(texts: Iterable[str], limit: int = CHUNK_CHARS) -> Iterator[TextChunk]:
    """Splits one document, given as strings of any size, into chunks of at most `limit` characters.

    Chunks end between a word and the white space after it. GPT-2's pre-tokenizer always splits
    there, so the tokens are those of the whole document. If 4096 characters contain no such place,
    the cut is arbitrary and may add one token.
    """
    held = ""
    for text in texts:
        held += text
        done = 0
        while len(held) - done > limit:
            end = _seam(held, done, done + limit)
            yield TextChunk(held[done:end], False)
            done = end
        held = held[done:]
    yield TextChunk(held, True)


def labeled(parts: Iterable[TextChunk], label: str | None) -> Iterator[TextChunk]:
    """Adds a label to chunks."""
    return (part._replace(label=label) for part in parts)


def _seam(text: str, start: int, limit: int) -> int:
    """Returns the last place to cut in text[start:limit]; the text continues after `limit`."""
    # The look-ahead reads one character more, so a seam at the limit itself is found.
    low = max(start, limit - _LOOK_BACK)
    *_, end = (limit, *(seam.end() for seam in _SEAM.finditer(text, low, limit + 1)))
    return end
