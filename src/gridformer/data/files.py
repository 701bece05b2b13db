"""Text out of one file, whatever its format: plain text, JSON lines, Arrow or Parquet tables."""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from gridformer.data.pieces import Piece, pieces
from gridformer.data.records import NO_TEXT, checked_text, missing_key
from gridformer.errors import DataError

JSON_LINES = (".jsonl", ".jsonl.gz")
TABLES = (".parquet", ".arrow")
TEXT_SUFFIXES = (
    *(".txt", ".txt.gz", ".text", ".md", ".rst", ".tex", ".py", ".c", ".h", ".cc", ".cpp"),
    *(".hpp", ".java", ".js", ".ts", ".go", ".rs", ".sh"),
)
DEFAULT_SUFFIXES = (*TEXT_SUFFIXES, *JSON_LINES, *TABLES)
BINARY = "files with NUL bytes"
_CHUNK = 1 << 20


def file_pieces(path: Path, text_key: str, skipped: Counter[str]) -> Iterator[Piece]:
    """The documents of a file: one of a text file, one a line or row of the other formats.

    Counts in `skipped` what is left out. Raises DataError where the file cannot be read.
    """
    try:
        if path.name.endswith(JSON_LINES):
            yield from _json_lines(path, text_key, skipped)
        elif path.name.endswith(TABLES):
            from gridformer.data.hf import table_pieces

            yield from table_pieces(path, text_key, skipped)
        else:
            yield from _text(path, skipped)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read ({reason})") from error


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _chunks(path: Path) -> Iterator[bytes]:
    with _open(path) as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _text(path: Path, skipped: Counter[str]) -> Iterator[Piece]:
    # A first pass looks for NUL bytes, since tokens cannot be taken back. It costs a file of up
    # to one chunk nothing; of others the second pass mostly finds the page cache warm.
    first, rest = b"", False
    for chunk in _chunks(path):
        if b"\0" in chunk:
            skipped[BINARY] += 1
            return
        first, rest = first or chunk, bool(first)
    # "utf-8-sig" drops a byte order mark; line ends stay as they are.
    decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")

    def decoded() -> Iterator[str]:
        for chunk in _chunks(path) if rest else (first,):
            yield decoder.decode(chunk)
        yield decoder.decode(b"", final=True)

    yield from pieces(decoded())


def _json_lines(path: Path, text_key: str, skipped: Counter[str]) -> Iterator[Piece]:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                record = json.loads(line.decode("utf-8", "replace"))
            except ValueError as error:
                raise DataError(f"{where}: is not JSON ({error})") from None
            if not isinstance(record, dict):
                raise DataError(f"{where}: is {type(record).__name__}, not an object with keys")
            if text_key not in record:
                raise missing_key(where, text_key, list(record))
            text = checked_text(record[text_key], where, text_key)
            if not text:
                skipped[NO_TEXT] += 1
                continue
            yield from pieces([text])
