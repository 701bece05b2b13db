"""What a SOURCE of `gridformer prepare` may be: files, folders, globs, data sets, built-in names.

A source is read as often as needed (a sample for the tokenizer, then everything) and lazily: it
never holds more than a piece of a document.
"""

from __future__ import annotations

import glob
import os
import platform
import random
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gridformer.data import hf
from gridformer.data.files import DEFAULT_SUFFIXES, TABLES, file_pieces
from gridformer.data.pieces import Piece
from gridformer.errors import DataError, UserError

PYTHON_STDLIB = "python-stdlib"
# Tests and their data, other people's packages, and folders without a library's source.
_NOT_STDLIB = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib-dynload", "__pycache__"}
)


class Source(Protocol):
    """Documents in pieces, and where they come from."""

    @property
    def name(self) -> str:
        """As the user wrote it."""

    @property
    def license(self) -> str | None:
        """None where nobody said."""

    @property
    def n_bytes(self) -> int | None:
        """Bytes to read, for progress; None where that is not known beforehand."""

    def pieces(self, skipped: Counter[str]) -> Iterator[Piece]:
        """All documents, in an order that never changes; counts what is left out."""

    def sample(self) -> Iterator[Piece]:
        """The same, in an order in which the beginning is typical of the whole."""


@dataclass(frozen=True)
class FileSource:
    """Documents out of files."""

    name: str
    paths: tuple[Path, ...]
    text_key: str = "text"
    license: str | None = None

    @property
    def n_bytes(self) -> int | None:
        if any(path.suffix == ".gz" or path.name.endswith(TABLES) for path in self.paths):
            return None
        return sum(path.stat().st_size for path in self.paths)

    def pieces(self, skipped: Counter[str]) -> Iterator[Piece]:
        for path in self.paths:
            yield from file_pieces(path, self.text_key, skipped)

    def sample(self) -> Iterator[Piece]:
        paths = list(self.paths)
        # Folders are read in sorted order; their first megabytes may be all of one kind.
        random.Random(0).shuffle(paths)
        for path in paths:
            yield from file_pieces(path, self.text_key, Counter())


def open_sources(
    specs: Sequence[str],
    *,
    suffixes: Sequence[str] = (),
    text_key: str = "text",
    split: str = "train",
) -> list[Source]:
    """Find out what each SOURCE is; reads nothing yet.

    suffixes: of the files taken from folders, empty for DEFAULT_SUFFIXES. text_key: of JSON lines
    and tables. split: of data sets. Raises UserError for a source that does not exist, DataError
    for a folder without a fitting file.
    """
    if not specs:
        raise UserError(f"name at least one source, for instance {PYTHON_STDLIB}")
    wanted = tuple(s if s.startswith(".") else f".{s}" for s in suffixes) or DEFAULT_SUFFIXES
    return [_open_source(spec, wanted, text_key, split) for spec in specs]


def _open_source(spec: str, suffixes: tuple[str, ...], text_key: str, split: str) -> Source:
    if spec == PYTHON_STDLIB:
        return python_stdlib()
    if spec.startswith("hf:"):
        return hf.hub_source(spec, split, text_key)
    path = Path(spec).expanduser()
    if path.is_file():
        return FileSource(spec, (path,), text_key)
    if path.is_dir():
        if hf.is_saved(path):
            return hf.saved_source(path, spec, split, text_key)
        found = _walk(path, suffixes)
        if not found:
            raise DataError(_nothing_fits(path, suffixes))
        return FileSource(spec, tuple(found), text_key)
    matches = sorted(map(Path, glob.glob(str(path), recursive=True)))
    files = tuple(match for match in matches if match.is_file())
    if not files:
        raise UserError(
            f"{spec}: no such file or folder, and no match as a pattern; a Hugging Face data set "
            f"is written hf:{spec}, built in is {PYTHON_STDLIB}"
        )
    return FileSource(spec, files, text_key)


def python_stdlib() -> FileSource:
    """The sources of this Python's standard library: text for a demonstration, no download.

    Raises UserError where they are not on this machine.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    # _sysconfigdata holds paths of the machine that Python was built on.
    found = [
        path
        for path in (_walk(root, (".py",), _NOT_STDLIB) if (root / "os.py").is_file() else [])
        if not path.name.startswith("_sysconfigdata")
    ]
    if not found:
        raise UserError(
            f"{PYTHON_STDLIB}: this Python comes without the sources of its standard library "
            f"(looked in {root}); use a Python that has them, or a folder of your own text"
        )
    terms = f"PSF-2.0 (Python Software Foundation License), Python {platform.python_version()}"
    return FileSource(PYTHON_STDLIB, tuple(found), license=terms)


def _walk(
    root: Path, suffixes: tuple[str, ...], without: frozenset[str] = frozenset()
) -> list[Path]:
    """Files with one of the suffixes, in sorted order; hidden files and folders are left out."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in without)
        fitting = (f for f in sorted(files) if f.endswith(suffixes) and not f.startswith("."))
        found += [path for f in fitting if (path := Path(folder, f)).is_file()]
    return found


def _nothing_fits(root: Path, suffixes: tuple[str, ...]) -> str:
    present = Counter(
        Path(name).suffix for _, _, files in os.walk(root) for name in files if Path(name).suffix
    )
    there = ", ".join(suffix for suffix, _ in present.most_common(5))
    remedy = f"there are {there}: choose with --suffix" if there else "there are no files"
    return f"{root}: has no file that ends in {', '.join(suffixes)}; {remedy}"
