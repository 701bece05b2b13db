"""Pairs from two text files, such as train.en and train.de: line i of one translates line i."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from gridformer.data.prepare.files import numbered_lines, readable
from gridformer.data.prepare.reading import Cursor
from gridformer.data.prepare.records import NO_PAIR
from gridformer.data.prepare.text_chunks import TextChunk, text_chunks
from gridformer.data.prepare.utf8 import decoded_line
from gridformer.data.tokenfolder import Kind, PartEntry
from gridformer.utils.errors import DataError, UserError

_SAMPLE_EVERY = 97  # a prime number of lines, so that it fits no regular pattern in a corpus


@dataclass(frozen=True)
class ParallelFiles:
    """Pairs of lines; see `gridformer.data.prepare.sources.Source`.

    Attributes:
        name: The source as the user wrote it.
        first: The file of the texts to translate.
        second: The file of their translations.
        license: The license, if known.
    """

    name: str
    first: Path
    second: Path
    license: str | None = None
    kind: Kind = "pairs"
    parts: tuple[PartEntry, ...] = ()

    @property
    def paths(self) -> tuple[Path, Path]:
        """Both files."""
        return self.first, self.second

    @property
    def languages(self) -> tuple[str, str]:
        """What the names of the files end with, .gz aside."""
        one, other = (_language(path) for path in (self.first, self.second))
        return one, other

    @property
    def n_bytes(self) -> int | None:
        if ".gz" in (self.first.suffix, self.second.suffix):
            return None
        return sum(path.stat().st_size for path in self.paths)

    def chunks(self, skipped: Counter[str], cursor: Cursor | None = None) -> Iterator[TextChunk]:
        for pair in self._pairs(skipped):
            if not all(pair):
                skipped[NO_PAIR] += 1
                continue
            for text in pair:
                yield from text_chunks([text])

    def sample(self) -> Iterator[TextChunk]:
        """Yields every 97th pair first, then the ones after those, and so on."""
        for start in range(_SAMPLE_EVERY):
            for pair in itertools.islice(self._pairs(Counter()), start, None, _SAMPLE_EVERY):
                for text in pair:
                    yield from text_chunks([text])

    def _pairs(self, skipped: Counter[str]) -> Iterator[tuple[str, str]]:
        one, other = _lines(self.first, skipped), _lines(self.second, skipped)
        for number, pair in enumerate(itertools.zip_longest(one, other), start=1):
            if None in pair:
                short, long = self.first, self.second
                if pair[0] is not None:
                    short, long = long, short
                raise DataError(
                    f"{short}: ends after {number - 1:,} lines, but {long} has more: line i of "
                    f"one must translate line i of the other"
                )
            yield cast(tuple[str, str], pair)


def parallel_files(specs: Sequence[str]) -> list[ParallelFiles]:
    """Opens the sources of `--pair-files`, two files each.

    Raises:
        UserError: Their number is odd, or one is not a file.
    """
    if len(specs) % 2:
        raise UserError(
            f"--pair-files reads two files at a time, the texts and their translations, but there "
            f"are {len(specs)} sources: write, for instance, train.en train.de"
        )
    paths = [Path(spec).expanduser() for spec in specs]
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path}: no such file, and --pair-files reads pairs of files")
    found = []
    for first, second in zip(paths[::2], paths[1::2]):
        if first == second:
            raise UserError(f"--pair-files {first} {second}: a file does not translate itself")
        found.append(ParallelFiles(f"{first} {second}", first, second))
    return found


def _language(path: Path) -> str:
    name = path.name.removesuffix(".gz")
    return Path(name).suffix.removeprefix(".") or name


def _lines(path: Path, skipped: Counter[str]) -> Iterator[str]:
    """Yields the lines of a file without the white space around them."""
    with readable(path):
        # By bytes, because text mode would also end lines at characters such as U+2028.
        for number, line in numbered_lines(path):
            text = decoded_line(line, f"{path}, line {number}", skipped)
            yield (text.removeprefix("\ufeff") if number == 1 else text).strip()
