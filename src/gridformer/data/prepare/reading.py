"""Sources and their items, read in batches between which a preparation may stop; and text files.

Text that is not UTF-8 is kept with U+FFFD for the bytes that are not, and counted, so that damage
is noticed.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import json
import os
import random
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Generic, NamedTuple, TypeVar, cast

from gridformer.data.tokenfolder import Kind, PartEntry
from gridformer.utils.errors import DataError
from gridformer.utils.files import parse_json
from gridformer.utils.units import MIB

# Large enough to keep the tokenizer's threads busy; its results take about 100 bytes per token.
BATCH_CHARS = 1 << 21
BATCH_ITEMS = 4096
PIECE_CHARS = 1 << 16  # of a text that is tokenized at a time
LONGEST_LINE = 256 * MIB  # bytes
BINARY = "files with NUL bytes"
_CHUNK = 1 << 20
_LOOK_BACK = 1 << 12  # characters before the limit in which to look for a place to cut
_SEAM = re.compile(r"\S(?=[ \n\r\t])")
_DAMAGED = "with bytes that are not UTF-8 text"

Item = TypeVar("Item")


class Text(NamedTuple):
    """A document, the next part of a long one, or a pair of texts."""

    text: str
    ends: bool = True  # whether the document ends with it
    label: str | None = None  # of the document, on all of its parts
    second: str | None = None  # the translation, in sources of pairs

    @property
    def texts(self) -> tuple[str, ...]:
        """The text, or both texts of a pair."""
        return (self.text,) if self.second is None else (self.text, self.second)


@dataclass
class Cursor:
    """Where the sources are being read, so that reading can go on there later."""

    source: int = 0  # its number
    mark: Any = None  # the last place that it reported with `reached`; None is its beginning
    items: int = 0  # read since the mark
    skipped: dict[str, int] = field(default_factory=dict)  # of all sources, at the mark

    def reached(self, mark: object, skipped: Counter[str]) -> None:
        """Tells that the next item is the first one after `mark`, a value that JSON can hold."""
        self.mark, self.items, self.skipped = json.loads(json.dumps(mark)), 0, dict(skipped)


# Yields the items of a source after cursor.mark, and calls cursor.reached where it can begin. A
# source that cannot begin in the middle never does, and is read again up to where it stopped.
Reader = Callable[[Counter[str], Cursor], Iterator[Item]]


@dataclass(frozen=True)
class Source(Generic[Item]):
    """Documents, and where they come from. They can be read several times."""

    name: str  # as the user wrote it
    read: Reader[Item]  # yields all items, always in the same order, and counts what it skips
    # Yields all items in an order whose beginning is typical of the whole; None means that of read.
    sample: Callable[[], Iterator[Item]] | None = None
    files: tuple[Path, ...] = ()  # if one changes, a preparation begins anew
    kind: Kind = "text"
    languages: tuple[str, str] | None = None
    license: str | None = None
    revision: object = None  # what else changes with its items
    n_bytes: int | None = None  # to read, for progress, if they are known
    parts: tuple[PartEntry, ...] = ()  # if they have licenses of their own
    options: tuple[str, ...] = ()  # for pairs and labels, which have an effect on it

    def sampled(self) -> Iterator[Item]:
        """Yields all items, the first of which are typical."""
        return self.sample() if self.sample else self.read(Counter(), Cursor())


TextSource = Source[Text]


def shuffled(items: Iterable[Any]) -> list[Any]:
    """Returns items in an order that looks random and is always the same."""
    every = [*items]
    random.Random(0).shuffle(every)
    return every


def files_below(
    root: Path, suffixes: tuple[str, ...] = ("",), without: frozenset[str] = frozenset()
) -> list[Path]:
    """Returns files with one of the suffixes in sorted order, without hidden files and folders."""
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in without)
        fitting = (n for n in sorted(names) if n.endswith(suffixes) and not n.startswith("."))
        files += [path for n in fitting if (path := Path(folder, n)).is_file()]
    return files


def batches(
    readers: Sequence[Reader[Item]],
    chars: Callable[[Item], int],
    skipped: Counter[str],
    start: Cursor,
) -> Iterator[tuple[list[Item], Cursor]]:
    """Yields the items of all sources after `start`, in order, and the place after each batch.

    Args:
        chars: Returns the characters of an item, which limit the size of a batch.
        skipped: Counts what is left out, and is set to what it was at `start`.
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


def pieces(texts: Iterable[str], limit: int = PIECE_CHARS) -> Iterator[Text]:
    """Splits one document, given as strings of any size, into parts of at most `limit` characters.

    Parts end between a word and the white space after it. GPT-2's pre-tokenizer always splits
    there, so the tokens are those of the whole document. If 4096 characters contain no such place,
    the cut is arbitrary and may add one token.
    """
    held = ""
    for text in texts:
        held += text
        done = 0
        while len(held) - done > limit:
            # The look-ahead reads one character more, so a seam at the limit itself is found.
            at, low = done + limit, max(done, done + limit - _LOOK_BACK)
            *_, end = (at, *(seam.end() for seam in _SEAM.finditer(held, low, at + 1)))
            yield Text(held[done:end], ends=False)
            done = end
        held = held[done:]
    yield Text(held)


def text_file(path: Path, skipped: Counter[str]) -> Iterator[Text]:
    """Yields the parts of a text file, which is one document, unless it has NUL bytes."""
    with readable(path):
        # A first pass looks for NUL bytes, because tokens cannot be taken back. It is free for a
        # file of up to one chunk; the second pass mostly reads from the page cache.
        first, rest = b"", False
        for chunk in _chunks(path):
            if b"\0" in chunk:
                skipped[BINARY] += 1
                return
            first, rest = first or chunk, bool(first)
        chunks = _chunks(path) if rest else (first,)
        yield from pieces(_decoded(chunks, str(path), skipped))


def _open_binary(path: Path) -> BinaryIO:
    """Opens a file for reading its bytes, which are decompressed if its name ends with .gz."""
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _chunks(path: Path) -> Iterator[bytes]:
    with _open_binary(path) as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def lines(path: Path, skipped: Counter[str]) -> Iterator[tuple[str, str]]:
    """Yields the lines of a file, each after its place for errors, without a byte order mark."""
    with readable(path), _open_binary(path) as file:
        # By bytes, because text mode would also end lines at characters such as U+2028. A small
        # .gz may have a line of many GB.
        for number, line in enumerate(iter(partial(file.readline, LONGEST_LINE + 1), b""), start=1):
            where = f"{path}, line {number}"
            if len(line) > LONGEST_LINE:
                most = f"has more than {LONGEST_LINE:,} bytes: write one record on each line"
                raise DataError(f"{where}: {most}")
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError:
                _count("lines", where, skipped)
                text = line.decode("utf-8", "replace")
            yield where, text.removeprefix("\ufeff") if number == 1 else text


def json_lines(path: Path, skipped: Counter[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the records of a file of JSON lines, each after its place for errors."""
    for where, line in lines(path, skipped):
        if not line.strip(" \t\n\r\v\f"):
            continue
        try:
            record = parse_json(line)
        except ValueError as error:
            raise DataError(f"{where}: is not JSON ({error})") from None
        if not isinstance(record, dict):
            raise DataError(f"{where}: is {type(record).__name__}, not an object with keys")
        yield where, record


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns errors of reading a file inside the block into one that names the file."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read ({reason})") from error


def _decoded(chunks: Iterable[bytes], where: str, skipped: Counter[str]) -> Iterator[str]:
    """Decodes a document chunk by chunk, and counts it once if it is not UTF-8 text."""
    # "utf-8-sig" drops a byte order mark and keeps line ends.
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    for chunk in chain(chunks, [b""]):
        before, final = decoder.getstate(), not chunk
        try:
            text = decoder.decode(chunk, final)
        except UnicodeDecodeError:
            _count("documents", where, skipped)
            decoder.errors = "replace"
            decoder.setstate(before)
            text = decoder.decode(chunk, final)
        yield text


def is_damage(what: str) -> bool:
    """Returns whether a count is of text that was kept although it was not UTF-8."""
    return _DAMAGED in what


def _count(unit: str, where: str, skipped: Counter[str]) -> None:
    # The first place is part of the name, so that it is kept if the preparation is stopped.
    name = f"{unit} {_DAMAGED} (first: "
    key = next((what for what in skipped if what.startswith(name)), f"{name}{where})")
    skipped[key] += 1
