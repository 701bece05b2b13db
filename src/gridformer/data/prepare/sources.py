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

from gridformer.data.prepare import hf
from gridformer.data.prepare.files import DEFAULT_SUFFIXES, RECORDS, TABLES, file_pieces
from gridformer.data.prepare.gettext import PREFIX, catalogue_source
from gridformer.data.prepare.records import Fields
from gridformer.data.prepare.text_chunks import Piece, labeled
from gridformer.data.tokenfolder import Kind, PartEntry
from gridformer.utils.errors import DataError, UserError

PYTHON_STDLIB = "python-stdlib"
# Tests and their data, other people's packages, and folders without a library's source.
_NOT_STDLIB = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib-dynload", "__pycache__"}
)
_TEXT = Fields()


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

    @property
    def kind(self) -> Kind:
        """What its documents are: texts, texts and their translations in turn, or labeled."""

    @property
    def languages(self) -> tuple[str, str] | None:
        """Of the two texts of a pair; None in other kinds."""

    @property
    def parts(self) -> tuple[PartEntry, ...]:
        """What it is made of, where parts have licences of their own."""

    def pieces(self, skipped: Counter[str]) -> Iterator[Piece]:
        """All documents, in an order that never changes; counts what is left out."""

    def sample(self) -> Iterator[Piece]:
        """The same, in an order in which the beginning is typical of the whole."""


@dataclass(frozen=True)
class FileSource:
    """Documents out of files. With label_root, the folder right below it is a file's label."""

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

    def pieces(self, skipped: Counter[str]) -> Iterator[Piece]:
        for path in self.paths:
            yield from self._of(path, skipped)

    def sample(self) -> Iterator[Piece]:
        paths = list(self.paths)
        # Folders are read in sorted order; their first megabytes may be all of one kind.
        random.Random(0).shuffle(paths)
        for path in paths:
            yield from self._of(path, Counter())

    def _of(self, path: Path, skipped: Counter[str]) -> Iterator[Piece]:
        parts = file_pieces(path, self.fields, skipped)
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
) -> list[Source]:
    """Find out what each SOURCE is; reads nothing yet.

    suffixes: of the files taken from folders, empty for DEFAULT_SUFFIXES. text_key: of JSON lines
    and tables, pair_keys: of the two texts there, label_key: of the label there.
    labels_from_folders takes a file's label from the folder it is in. split: of data sets. Raises
    UserError for a source that does not exist or that is of another kind than the others, DataError
    for a folder without a fitting file.
    """
    if not specs:
        raise UserError(f"name at least one source, for instance {PYTHON_STDLIB}")
    ways = {
        "--pair-keys": pair_keys,
        "--label-key": label_key,
        "--labels-from-folders": labels_from_folders,
    }
    used = [option for option, value in ways.items() if value]
    if len(used) > 1:
        raise UserError(f"{' and '.join(used)} exclude each other: keep one of them")
    fields = Fields(text_key, pair_keys, label_key)
    usual = DEFAULT_SUFFIXES if fields.kind == "text" else RECORDS
    wanted = tuple(s if s.startswith(".") else f".{s}" for s in suffixes) or usual
    sources = [_open_source(spec, wanted, fields, split, labels_from_folders) for spec in specs]
    if used and not any(used[0] in _ways_of(source) for source in sources):
        raise UserError(f"{', '.join(specs)}: {used[0]} changes nothing there: leave it out")
    for source in sources[1:]:
        _check_same(sources[0], source)
    return sources


def _ways_of(source: Source) -> tuple[str, ...]:
    """The options for pairs and labels that were heeded in a source."""
    if isinstance(source, FileSource) and source.label_root:
        return ("--labels-from-folders",)
    if isinstance(source, FileSource | hf.TableSource):
        return tuple(source.fields.options.values())
    return ()


def _check_same(one: Source, other: Source) -> None:
    if one.kind != other.kind:
        raise UserError(
            f"{one.name} holds {_called(one.kind)}, {other.name} holds {_called(other.kind)}: "
            f"prepare them into folders of their own"
        )
    if one.languages != other.languages:
        raise UserError(
            f"{one.name} translates {' to '.join(one.languages or ())}, {other.name} "
            f"{' to '.join(other.languages or ())}: prepare them into folders of their own"
        )


def _called(kind: Kind) -> str:
    return {"text": "text", "pairs": "pairs", "labeled": "labeled documents"}[kind]


def _open_source(
    spec: str, suffixes: tuple[str, ...], fields: Fields, split: str, from_folders: bool
) -> Source:
    if spec == PYTHON_STDLIB:
        return python_stdlib()
    if spec.startswith(PREFIX):
        return catalogue_source(spec)
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
                f"{path}: has files but no folders of them to name labels; --labels-from-folders "
                f"reads {path}/LABEL/FILE"
            )
        return FileSource(spec, below, fields, label_root=path)
    matches = sorted(map(Path, glob.glob(str(path), recursive=True)))
    files = tuple(match for match in matches if match.is_file())
    if not files:
        raise UserError(
            f"{spec}: no such file or folder, and no match as a pattern; a Hugging Face data set "
            f"is written hf:{spec}, built in are {PYTHON_STDLIB} and {PREFIX}de"
        )
    return FileSource(spec, files, fields)


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
