"""The sources of `gridformer prepare`: files, folders, globs, data sets, built-in names.

A source can be read several times (a sample for the tokenizer, then everything). It reads lazily
and never holds more than a chunk of a document.
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
from difflib import get_close_matches
from pathlib import Path
from typing import Protocol

from gridformer.data.prepare import hf
from gridformer.data.prepare.files import DEFAULT_SUFFIXES, FOLDER_RECORDS, TABLES, file_chunks
from gridformer.data.prepare.gettext import PREFIX, catalog_source
from gridformer.data.prepare.parallel_files import parallel_files
from gridformer.data.prepare.reading import Cursor
from gridformer.data.prepare.records import Fields
from gridformer.data.prepare.text_chunks import TextChunk, labeled
from gridformer.data.tokenfolder import Kind, PartEntry
from gridformer.utils.errors import DataError, UserError
from gridformer.utils.files import meant_beside

PYTHON_STDLIB = "python-stdlib"
# Tests and their data, third-party packages, and folders without Python sources.
_NOT_STDLIB = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib-dynload", "__pycache__"}
)
_TEXT = Fields()


class Source(Protocol):
    """Documents in chunks, and where they come from."""

    @property
    def name(self) -> str:
        """The source as the user wrote it."""

    @property
    def license(self) -> str | None:
        """The license, or None if it is not known."""

    @property
    def n_bytes(self) -> int | None:
        """The bytes to read, for progress, or None if they are not known beforehand."""

    @property
    def kind(self) -> Kind:
        """What its documents are: texts, alternating texts and translations, or labeled texts."""

    @property
    def languages(self) -> tuple[str, str] | None:
        """The languages of a pair's two texts; None for other kinds."""

    @property
    def parts(self) -> tuple[PartEntry, ...]:
        """The parts of the source, if they have their own licenses."""

    def chunks(self, skipped: Counter[str], cursor: Cursor | None = None) -> Iterator[TextChunk]:
        """Yields all documents, always in the same order, and counts in `skipped` what it skips.

        It begins after `cursor.mark`, and calls `cursor.reached` where it can begin, if anywhere.
        """

    def sample(self) -> Iterator[TextChunk]:
        """Yields all documents in an order whose beginning is typical of the whole."""


@dataclass(frozen=True)
class FileSource:
    """Documents from files.

    Attributes:
        name: The source as the user wrote it.
        paths: The files.
        fields: The keys of records.
        license: The license, if known.
        label_root: If given, the label of a file is the name of the folder directly below this one.
        parts: The parts of the source, if they have their own licenses.
    """

    name: str
    paths: tuple[Path, ...]
    fields: Fields = _TEXT
    license: str | None = None
    label_root: Path | None = None
    parts: tuple[PartEntry, ...] = ()

    @property
    def kind(self) -> Kind:
        return "labeled" if self.label_root else self.fields.kind

    @property
    def languages(self) -> tuple[str, str] | None:
        return self.fields.languages

    @property
    def n_bytes(self) -> int | None:
        if any(path.suffix == ".gz" or path.name.endswith(TABLES) for path in self.paths):
            return None
        return sum(path.stat().st_size for path in self.paths)

    def chunks(self, skipped: Counter[str], cursor: Cursor | None = None) -> Iterator[TextChunk]:
        """Yields the chunks from the file with the number cursor.mark on."""
        cursor = cursor or Cursor()
        for number in range(cursor.mark or 0, len(self.paths)):
            cursor.reached(number, skipped)
            yield from self._of(self.paths[number], skipped)

    def sample(self) -> Iterator[TextChunk]:
        paths = list(self.paths)
        # Folders are read in sorted order, so their first megabytes may not be typical.
        random.Random(0).shuffle(paths)
        for path in paths:
            yield from self._of(path, Counter())

    def _of(self, path: Path, skipped: Counter[str]) -> Iterator[TextChunk]:
        parts = file_chunks(path, self.fields, skipped)
        if self.label_root is None:
            return parts
        return labeled(parts, path.relative_to(self.label_root).parts[0])


def open_sources(
    specs: Sequence[str],
    *,
    suffixes: Sequence[str] = (),
    text_key: str = "text",
    split: str = "train",
    pair_keys: tuple[str, str] | None = None,
    label_key: str | None = None,
    labels_from_folders: bool = False,
    pair_files: bool = False,
) -> list[Source]:
    """Finds out what each SOURCE is, without reading its documents.

    Args:
        specs: The sources as the user wrote them.
        suffixes: The suffixes of the files to take from folders; empty means DEFAULT_SUFFIXES, or
            FOLDER_RECORDS for pairs and labels.
        text_key: The key of the text in JSON lines and tables.
        split: The split of data sets.
        pair_keys: The keys of a pair's two texts in JSON lines and tables.
        label_key: The key of the label in JSON lines and tables.
        labels_from_folders: Whether the label of a file is the name of its folder.
        pair_files: Whether every two sources are a text file and its translation, line by line.

    Raises:
        UserError: A source does not exist, is of another kind than the others, or an option does
            not apply.
        DataError: A folder contains no fitting file, or a data set cannot be loaded.
    """
    if not specs:
        raise UserError(f"name at least one source, for instance {PYTHON_STDLIB}")
    ways = {
        "--pair-keys": pair_keys,
        "--label-key": label_key,
        "--labels-from-folders": labels_from_folders,
        "--pair-files": pair_files,
    }
    used = [option for option, value in ways.items() if value]
    if len(used) > 1:
        raise UserError(f"{' and '.join(used)} exclude each other: keep one of them")
    if pair_files:
        found = parallel_files(specs)
        for one in found[1:]:
            _check_same(found[0], one)
        return [*found]
    fields = Fields(text_key, pair_keys, label_key)
    usual = DEFAULT_SUFFIXES if fields.kind == "text" else FOLDER_RECORDS
    wanted = tuple(s if s.startswith(".") else f".{s}" for s in suffixes) or usual
    sources = [_open_source(spec, wanted, fields, split, labels_from_folders) for spec in specs]
    if used and not any(used[0] in _ways_of(source) for source in sources):
        raise UserError(f"{', '.join(specs)}: {used[0]} has no effect there: omit it")
    for source in sources[1:]:
        _check_same(sources[0], source)
    return sources


def _ways_of(source: Source) -> tuple[str, ...]:
    """Returns the options for pairs and labels that have an effect on a source."""
    if isinstance(source, FileSource) and source.label_root:
        return ("--labels-from-folders",)
    if isinstance(source, FileSource | hf.TableSource):
        return tuple(source.fields.options.values())
    return ()


def _check_same(one: Source, other: Source) -> None:
    if one.kind != other.kind:
        raise UserError(
            f"{one.name} holds {_called(one.kind)}, {other.name} holds {_called(other.kind)}: "
            f"prepare them into separate folders"
        )
    if one.languages != other.languages:
        raise UserError(
            f"{one.name} translates {' to '.join(one.languages or ())}, {other.name} "
            f"{' to '.join(other.languages or ())}: prepare them into separate folders"
        )


def _called(kind: Kind) -> str:
    return {"text": "text", "pairs": "pairs", "labeled": "labeled documents", "chat": "chats"}[kind]


def _open_source(
    spec: str, suffixes: tuple[str, ...], fields: Fields, split: str, from_folders: bool
) -> Source:
    if spec == PYTHON_STDLIB:
        return python_stdlib()
    if spec.startswith(PREFIX):
        return catalog_source(spec)
    if spec.startswith("hf:"):
        return hf.hub_source(spec, split, fields)
    path = Path(spec).expanduser()
    if path.is_file():
        return FileSource(spec, (path,), fields)
    if path.is_dir():
        if hf.is_saved(path):
            return hf.saved_source(path, spec, split, fields)
        found = _walk(path, suffixes)
        if not found:
            raise DataError(_nothing_fits(path, suffixes))
        if not from_folders:
            return FileSource(spec, tuple(found), fields)
        below = tuple(file for file in found if file.parent != path)
        if not below:
            raise DataError(
                f"{path}: has files, but no folders whose names are labels; --labels-from-folders "
                f"reads {path}/LABEL/FILE"
            )
        return FileSource(spec, below, fields, label_root=path)
    matches = sorted(map(Path, glob.glob(str(path), recursive=True)))
    files = tuple(match for match in matches if match.is_file())
    if not files:
        built_in = get_close_matches(spec, [PYTHON_STDLIB], cutoff=0.8)
        if meant := next(iter(built_in), "") or meant_beside(path, lambda _: True):
            raise UserError(f"{spec}: no such file or folder: did you mean '{meant}'?")
        raise UserError(
            f"{spec}: no such file or folder, and no match as a pattern; a Hugging Face data set "
            f"is written hf:{spec}, and built-in sources are {PYTHON_STDLIB} and {PREFIX}de"
        )
    return FileSource(spec, files, fields)


def python_stdlib() -> FileSource:
    """Opens the source files of this Python's standard library, as a text without a download.

    Raises:
        UserError: They are not on this machine.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    # _sysconfigdata contains paths of the machine on which Python was built.
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
    """Returns files with one of the suffixes in sorted order, without hidden files and folders."""
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
