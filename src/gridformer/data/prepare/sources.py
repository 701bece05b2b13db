"""The sources of `gridformer prepare`: files, folders, globs, data sets, built-in names.

A source can be read several times (a sample for the tokenizer, then everything). It reads lazily,
and holds no more than a record, or a part of a text file.
"""

from __future__ import annotations

import glob
import itertools
import os
import platform
import random
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic

from gridformer.data.prepare import hf
from gridformer.data.prepare.gettext import PREFIX, read_catalogs
from gridformer.data.prepare.reading import Cursor, Item, Reader, Text, lines
from gridformer.data.prepare.records import (
    DEFAULT_SUFFIXES,
    FOLDER_RECORDS,
    NO_PAIR,
    TABLES,
    Fields,
    file_texts,
)
from gridformer.data.tokenfolder import Kind, PartEntry
from gridformer.utils.errors import DataError, UserError
from gridformer.utils.files import meant_beside

PYTHON_STDLIB = "python-stdlib"
# Tests and their data, third-party packages, and folders without Python sources.
_NOT_STDLIB = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib-dynload", "__pycache__"}
)
_SAMPLE_EVERY = 97  # a prime number of lines, so that it fits no regular pattern in a corpus
_KINDS = {"text": "text", "pairs": "pairs", "labeled": "labeled documents", "chat": "chats"}


@dataclass(frozen=True)
class Source(Generic[Item]):
    """Documents, and where they come from.

    Attributes:
        name: The source as the user wrote it.
        read: Yields all items, always in the same order, and counts what it skips. It begins after
            the mark of the cursor, which it tells where it can begin again, if anywhere.
        sample: Yields all items in an order whose beginning is typical of the whole; None means
            that of `read`.
        files: The files that are read: others, or changed ones, cannot go on with what was written.
        kind: What its documents are.
        revision: What else changes with its items.
        n_bytes: The bytes to read, for progress; None if they are not known.
        parts: The parts of the source, if they have their own licenses.
        options: The options for pairs and labels that have an effect on it.
    """

    name: str
    read: Reader[Item]
    sample: Callable[[], Iterator[Item]] | None = None
    files: tuple[Path, ...] = ()
    kind: Kind = "text"
    languages: tuple[str, str] | None = None
    license: str | None = None
    revision: object = None
    n_bytes: int | None = None
    parts: tuple[PartEntry, ...] = ()
    options: tuple[str, ...] = ()

    def sampled(self) -> Iterator[Item]:
        """Yields all items, the first of which are typical."""
        return self.sample() if self.sample else self.read(Counter(), Cursor())


TextSource = Source[Text]


def file_source(
    name: str,
    files: Sequence[Path],
    fields: Fields,
    license: str | None = None,
    label_root: Path | None = None,
) -> TextSource:
    """Returns a source of documents from files.

    Args:
        label_root: If given, the label of a file is the name of the folder directly below this one.
    """

    def of(file: Path, skipped: Counter[str]) -> Iterator[Text]:
        texts = file_texts(file, fields, skipped)
        if label_root is None:
            return texts
        label = file.relative_to(label_root).parts[0]
        return (text._replace(label=label) for text in texts)

    def read(skipped: Counter[str], cursor: Cursor) -> Iterator[Text]:
        """Yields the documents from the file with the number cursor.mark on."""
        for number in range(cursor.mark or 0, len(files)):
            cursor.reached(number, skipped)
            yield from of(files[number], skipped)

    def sample() -> Iterator[Text]:
        # Folders are read in sorted order, so their first megabytes may not be typical.
        return itertools.chain.from_iterable(of(file, Counter()) for file in _shuffled(files))

    sized = not any(file.suffix == ".gz" or file.name.endswith(TABLES) for file in files)
    return Source(
        name,
        read,
        sample,
        tuple(files),
        "labeled" if label_root else fields.kind,
        fields.languages,
        license,
        repr(fields),
        sum(file.stat().st_size for file in files) if sized else None,
        options=("--labels-from-folders",) if label_root else tuple(fields.options.values()),
    )


def _table_source(table: hf.Table, fields: Fields) -> TextSource:
    def read(skipped: Counter[str], cursor: Cursor) -> Iterator[Text]:
        return hf.table_texts(table, fields, skipped, cursor)

    return Source(
        table.name,
        read,
        files=table.files,
        kind=fields.kind,
        languages=fields.languages,
        license=table.license,
        revision=repr((fields, table.revision)),
        options=tuple(fields.options.values()),
    )


def parallel_source(first: Path, second: Path) -> TextSource:
    """Returns a source of pairs from two files, such as train.en and train.de, line by line."""

    def pairs(skipped: Counter[str]) -> Iterator[Text]:
        both = (lines(file, skipped) for file in (first, second))
        for number, (one, other) in enumerate(itertools.zip_longest(*both), start=1):
            if one is None or other is None:
                short, long = (first, second) if one is None else (second, first)
                raise DataError(
                    f"{short}: ends after {number - 1:,} lines, but {long} has more: line i of "
                    f"one must translate line i of the other"
                )
            yield Text(one[1].strip(), second=other[1].strip())

    def read(skipped: Counter[str], cursor: Cursor) -> Iterator[Text]:
        for pair in pairs(skipped):
            if all(pair.texts):
                yield pair
            else:
                skipped[NO_PAIR] += 1

    def sample() -> Iterator[Text]:
        """Yields every 97th pair first, then the ones after those, and so on."""
        for start in range(_SAMPLE_EVERY):
            yield from itertools.islice(pairs(Counter()), start, None, _SAMPLE_EVERY)

    sized = ".gz" not in (first.suffix, second.suffix)
    return Source(
        f"{first} {second}",
        read,
        sample,
        (first, second),
        "pairs",
        (_language(first), _language(second)),
        n_bytes=first.stat().st_size + second.stat().st_size if sized else None,
    )


def _parallel_sources(specs: Sequence[str]) -> list[TextSource]:
    """Returns the sources of `--pair-files`, two files each."""
    if len(specs) % 2:
        raise UserError(
            f"--pair-files reads two files at a time, the texts and their translations, but there "
            f"are {len(specs)} sources: write, for instance, train.en train.de"
        )
    paths = [Path(spec).expanduser() for spec in specs]
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path}: no such file, and --pair-files reads pairs of files")
    both = [*zip(paths[::2], paths[1::2])]
    for first, second in both:
        if first == second:
            raise UserError(f"--pair-files {first} {second}: a file does not translate itself")
    return [parallel_source(first, second) for first, second in both]


def _language(path: Path) -> str:
    """Returns what the name of a file ends with, .gz aside."""
    name = path.name.removesuffix(".gz")
    return Path(name).suffix.removeprefix(".") or name


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
) -> list[TextSource]:
    """Finds out what each SOURCE is, without reading its documents.

    Args:
        suffixes: The suffixes of the files to take from folders; empty means DEFAULT_SUFFIXES, or
            FOLDER_RECORDS for pairs and labels.
        labels_from_folders: Whether the label of a file is the name of its folder.
        pair_files: Whether every two sources are a text file and its translation, line by line.
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
        sources = _parallel_sources(specs)
    else:
        fields = Fields(text_key, pair_keys, label_key)
        usual = DEFAULT_SUFFIXES if fields.kind == "text" else FOLDER_RECORDS
        wanted = tuple(s if s.startswith(".") else f".{s}" for s in suffixes) or usual
        sources = [_open_source(spec, wanted, fields, split, labels_from_folders) for spec in specs]
        if used and not any(used[0] in source.options for source in sources):
            raise UserError(f"{', '.join(specs)}: {used[0]} has no effect there: omit it")
    for source in sources[1:]:
        _check_same(sources[0], source)
    return sources


def _shuffled(items: Sequence[Any]) -> list[Any]:
    shuffled = [*items]
    random.Random(0).shuffle(shuffled)
    return shuffled


def _check_same(one: TextSource, other: TextSource) -> None:
    if one.kind != other.kind:
        raise UserError(
            f"{one.name} holds {_KINDS[one.kind]}, {other.name} holds {_KINDS[other.kind]}: "
            f"prepare them into separate folders"
        )
    if one.languages != other.languages:
        raise UserError(
            f"{one.name} translates {' to '.join(one.languages or ())}, {other.name} "
            f"{' to '.join(other.languages or ())}: prepare them into separate folders"
        )


def _catalog_source(spec: str) -> TextSource:
    catalogs = read_catalogs(spec)
    pairs = [Text(pair.source, second=pair.target) for pair in catalogs.pairs]

    def read(skipped: Counter[str], cursor: Cursor) -> Iterator[Text]:
        skipped.update(catalogs.skipped)
        yield from pairs

    return Source(
        spec,
        read,
        lambda: iter(_shuffled(pairs)),
        catalogs.files,
        "pairs",
        catalogs.languages,
        catalogs.license,
        n_bytes=sum(len(text.encode()) for pair in pairs for text in pair.texts),
        parts=catalogs.parts,
    )


def _open_source(
    spec: str, suffixes: tuple[str, ...], fields: Fields, split: str, from_folders: bool
) -> TextSource:
    if spec == PYTHON_STDLIB:
        return python_stdlib()
    if spec.startswith(PREFIX):
        return _catalog_source(spec)
    if spec.startswith("hf:"):
        return _table_source(hf.hub_table(spec, split), fields)
    path = Path(spec).expanduser()
    if path.is_file():
        return file_source(spec, [path], fields)
    if path.is_dir():
        if hf.is_saved(path):
            return _table_source(hf.saved_table(path, spec, split), fields)
        walked = _walk(path, suffixes)
        if not walked:
            names = (Path(name).suffix for _, _, files in os.walk(path) for name in files)
            there = ", ".join(s for s, _ in Counter(name for name in names if name).most_common(5))
            remedy = f"there are {there}: choose with --suffix" if there else "there are no files"
            raise DataError(f"{path}: has no file that ends in {', '.join(suffixes)}; {remedy}")
        if not from_folders:
            return file_source(spec, walked, fields)
        below = [file for file in walked if file.parent != path]
        if not below:
            raise DataError(
                f"{path}: has files, but no folders whose names are labels; --labels-from-folders "
                f"reads {path}/LABEL/FILE"
            )
        return file_source(spec, below, fields, label_root=path)
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
    return file_source(spec, files, fields)


def python_stdlib() -> TextSource:
    """Opens the source files of this Python's standard library, as a text without a download."""
    root = Path(sysconfig.get_paths()["stdlib"])
    # _sysconfigdata contains paths of the machine on which Python was built.
    files = [
        path
        for path in (_walk(root, (".py",), _NOT_STDLIB) if (root / "os.py").is_file() else [])
        if not path.name.startswith("_sysconfigdata")
    ]
    if not files:
        raise UserError(
            f"{PYTHON_STDLIB}: this Python comes without the sources of its standard library "
            f"(looked in {root}); use a Python that has them, or a folder of your own text"
        )
    terms = f"PSF-2.0 (Python Software Foundation License), Python {platform.python_version()}"
    return file_source(PYTHON_STDLIB, files, Fields(), terms)


def _walk(
    root: Path, suffixes: tuple[str, ...], without: frozenset[str] = frozenset()
) -> list[Path]:
    """Returns files with one of the suffixes in sorted order, without hidden files and folders."""
    walked = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in without)
        fitting = (f for f in sorted(files) if f.endswith(suffixes) and not f.startswith("."))
        walked += [path for f in fitting if (path := Path(folder, f)).is_file()]
    return walked
