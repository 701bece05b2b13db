"""Decodes text that should be UTF-8, and counts text that is not, so that damage is noticed."""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Iterable, Iterator

_WHAT = "with bytes that are not UTF-8 text"


def decoded_line(line: bytes, where: str, skipped: Counter[str]) -> str:
    """Decodes a line, and counts it if it is not UTF-8 text; U+FFFD stands for such bytes."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        _count("lines", where, skipped)
        return line.decode("utf-8", "replace")


def decoded_document(chunks: Iterable[bytes], where: str, skipped: Counter[str]) -> Iterator[str]:
    """Decodes a document piece by piece as `decoded_line` does, and counts it once."""
    # "utf-8-sig" drops a byte order mark and keeps line ends.
    decoder = codecs.getincrementaldecoder("utf-8-sig")()

    def decode(chunk: bytes, final: bool = False) -> str:
        before = decoder.getstate()
        try:
            return decoder.decode(chunk, final)
        except UnicodeDecodeError:
            _count("documents", where, skipped)
            decoder.errors = "replace"
            decoder.setstate(before)
            return decoder.decode(chunk, final)

    for chunk in chunks:
        yield decode(chunk)
    yield decode(b"", final=True)


def is_damage(what: str) -> bool:
    """Returns whether a count is of text that was kept although it was not UTF-8."""
    return _WHAT in what


def _count(unit: str, where: str, skipped: Counter[str]) -> None:
    # The first place is part of the name, so that it is kept if the preparation is stopped.
    name = f"{unit} {_WHAT} (first: "
    key = next((what for what in skipped if what.startswith(name)), f"{name}{where})")
    skipped[key] += 1
