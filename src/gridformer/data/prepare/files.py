"""Reads documents from one file: plain text, JSON lines, or a table that `datasets` reads."""

from __future__ import annotations

import contextlib
import gzip
import zlib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from gridformer.data.prepare.records import Fields, record_chunks
from gridformer.data.prepare.text_chunks import TextChunk, text_chunks
from gridformer.data.prepare.utf8 import decoded_document, decoded_line
from gridformer.utils.errors import DataError
from gridformer.utils.files import parse_json
from gridformer.utils.units import MIB

JSON_LINES = (".jsonl", ".jsonl.gz")
TABLES = (".parquet", ".arrow", ".csv", ".tsv", ".json")
RECORDS = (*JSON_LINES, *TABLES)
# Of a folder, .json and the like are read only if --suffix names them: they may hold settings.
FOLDER_RECORDS = (*JSON_LINES, ".parquet", ".arrow")
TEXT_SUFFIXES = (
    *(".txt", ".txt.gz", ".text", ".md", ".rst", ".tex", ".py", ".c", ".h", ".cc", ".cpp"),
    *(".hpp", ".java", ".js", ".ts", ".go", ".rs", ".sh"),
)
DEFAULT_SUFFIXES = (*TEXT_SUFFIXES, *FOLDER_RECORDS)
_INSTEAD = {"pairs": "", "labels": ": put it into folders, and use --labels-from-folders"}
BINARY = "files with NUL bytes"
_CHUNK = 1 << 20
LONGEST_LINE = 256 * MIB  # bytes


def file_chunks(path: Path, fields: Fields, skipped: Counter[str]) -> Iterator[TextChunk]:
    """Yields the documents of a file: a text file is one, other formats have one per line or row.

    Args:
        path: The file.
        fields: The keys of records.
        skipped: Counts what is left out, and what is not UTF-8 text.

    Raises:
        DataError: The file cannot be read, or is plain text and `fields` asks for pairs or labels.
    """
    with readable(path):
        if path.name.endswith(JSON_LINES):
            yield from _json_lines(path, fields, skipped)
        elif path.name.endswith(TABLES):
            from gridformer.data.prepare.hf import table_chunks

            yield from table_chunks(path, fields, skipped)
        elif fields.kind == "text":
            yield from _text(path, skipped)
        else:
            what = "pairs" if fields.pair else "labels"
            raise DataError(
                f"{path}: {what} are read from the records of {', '.join(RECORDS)} files, but "
                f"this is plain text" + _INSTEAD[what]
            )


def open_binary(path: Path) -> BinaryIO:
    """Opens a file for reading its bytes, which are decompressed if its name ends with .gz."""
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a file with their numbers; a small .gz may have one of many GB."""
    with open_binary(path) as file:
        read = partial(file.readline, LONGEST_LINE + 1)
        for number, line in enumerate(iter(read, b""), start=1):
            if len(line) > LONGEST_LINE:
                most = f"has more than {LONGEST_LINE:,} bytes: write one record on each line"
                raise DataError(f"{path}, line {number}: {most}")
            yield number, line


def _chunks(path: Path) -> Iterator[bytes]:
    with open_binary(path) as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _text(path: Path, skipped: Counter[str]) -> Iterator[TextChunk]:
    # A first pass looks for NUL bytes, because tokens cannot be taken back. It is free for a file
    # of up to one chunk; the second pass over a larger file mostly reads from the page cache.
    first, rest = b"", False
    for chunk in _chunks(path):
        if b"\0" in chunk:
            skipped[BINARY] += 1
            return
        first, rest = first or chunk, bool(first)
    chunks = _chunks(path) if rest else (first,)
    yield from text_chunks(decoded_document(chunks, str(path), skipped))


def _json_lines(path: Path, fields: Fields, skipped: Counter[str]) -> Iterator[TextChunk]:
    for where, record in json_lines(path, skipped):
        yield from record_chunks(record, fields, where, skipped)


def json_lines(path: Path, skipped: Counter[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the records of a file of JSON lines, each after its place for errors.

    Raises:
        DataError: The file cannot be read, or a line is not a record.
    """
    with readable(path):
        for number, line in numbered_lines(path):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            text = decoded_line(line, where, skipped)
            try:
                record = parse_json(text.removeprefix("\ufeff") if number == 1 else text)
            except ValueError as error:
                raise DataError(f"{where}: is not JSON ({error})") from None
            if not isinstance(record, dict):
                raise DataError(f"{where}: is {type(record).__name__}, not an object with keys")
            yield where, record


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns errors of reading a file inside the block into one that names the file.

    Raises:
        DataError: The file cannot be read, or its compressed content is damaged.
    """
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read ({reason})") from error
