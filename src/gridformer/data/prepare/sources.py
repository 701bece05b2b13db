"""The sources of `gridformer prepare`: files, folders, globs, data sets, built-in names.

They hold no more than a record, or a part of a text file, at a time.
"""

from __future__ import annotations

import glob
import itertools
import platform
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gridformer.data.prepare.gettext import PREFIX, catalog_source
from gridformer.data.prepare.reading import (
    Cursor,
    Source,
    Text,
    TextSource,
    files_below,
    lines,
    shuffled,
)
from gridformer.data.prepare.records import (
    DEFAULT_SUFFIXES,
    FOLDER_RECORDS,
    NO_PAIR,
    TABLES,
    Fields,
    file_items,
    hub_source,
    is_saved,
    saved_source,
)
from gridformer.utils.errors import DataError, UserError
from gridformer.utils.files import meant_beside

PYTHON_STDLIB = "python-stdlib"
# Tests and their data, third-party packages, and folders without Python sources.
_NOT_STDLIB = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib-dynload", "__pycache__"}
)
_SAMPLE_EVERY = 97  # a prime number of lines, so that it fits no regular pattern in a corpus
_KINDS = {"text": "text", "pairs": "pairs", "labeled": "labeled documents", "chat": "chats"}


def file_source(
    name: str,
    files: Sequence[Path],
    fields: Fields,
    license: str | None = None,
    label_root: Path | None = None,
    left_out: Mapping[str, int] = MappingProxyType({}),
) -> Source[Any]:
    """Returns a source of files.

    Args:
        label_root: Labels are the names of the folders below it.
        left_out: Counts what was there and is not among the files.
    """

    def of(file: Path, skipped: Counter[str]) -> Iterator[Any]:
        items = file_items(file, fields, skipped)
        if label_root is None:
            return items
        label = file.relative_to(label_root).parts[0]
        return (text._replace(label=label) for text in items)

    def read(skipped: Counter[str], cursor: Cursor) -> Iterator[Any]:
        """Yields the documents from the file with the number cursor.mark on."""
        if cursor.mark is None:
            skipped.update(left_out)
        for number in range(cursor.mark or 0, len(files)):
            cursor.reached(number, skipped)
            yield from of(files[number], skipped)

    def sample() -> Iterator[Any]:
        # Folders are read in sorted order, so their first megabytes may not be typical.
        return itertools.chain.from_iterable(of(file, Counter()) for file in shuffled(files))

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


def parallel_source(first: Path, second: Path) -> TextSource:
    """Returns a source of pairs from two files, such as train.en and train.de, line by line."""
    if first == second:
        raise UserError(f"--pair-files {first} {second}: a file does not translate itself")

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
    if gone := next((path for path in paths if not path.is_file()), None):
        raise UserError(f"{gone}: no such file, and --pair-files reads pairs of files")
    return [parallel_source(first, second) for first, second in zip(paths[::2], paths[1::2])]


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
    """Finds out what each SOURCE is.

    Args:
        suffixes: The suffixes of the files to take from folders; empty means DEFAULT_SUFFIXES, or
            FOLDER_RECORDS for pairs and labels.
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
        sources = [open_source(spec, wanted, fields, split, labels_from_folders) for spec in specs]
        if used and not any(used[0] in source.options for source in sources):
            raise UserError(f"{', '.join(specs)}: {used[0]} has no effect there: omit it")
    one = sources[0]
    for other in sources[1:]:
        apart = ": prepare them into separate folders"
        if one.kind != other.kind:
            kinds = f"{one.name} holds {_KINDS[one.kind]}, {other.name} holds {_KINDS[other.kind]}"
            raise UserError(kinds + apart)
        if one.languages != other.languages:
            first, second = (" to ".join(source.languages or ()) for source in (one, other))
            raise UserError(f"{one.name} translates {first}, {other.name} {second}{apart}")
    return sources


def open_source(
    spec: str, suffixes: tuple[str, ...], fields: Fields, split: str, from_folders: bool = False
) -> Source[Any]:
    """Finds out what one SOURCE is, without reading its documents."""
    if spec == PYTHON_STDLIB:
        return python_stdlib()
    if spec.startswith(PREFIX):
        return catalog_source(spec)
    if spec.startswith("hf:"):
        return hub_source(spec, split, fields)
    path = Path(spec).expanduser()
    if path.is_file():
        return file_source(spec, [path], fields)
    if path.is_dir():
        if is_saved(path):
            return saved_source(path, spec, split, fields)
        walked, every = files_below(path, suffixes), files_below(path)
        taken = {*walked}
        others = Counter(file.suffix for file in every if file not in taken).most_common()
        if not walked:
            there = ", ".join([suffix for suffix, _ in others if suffix][:5])
            remedy = f"there are {there}: choose with --suffix" if there else "there are no files"
            raise DataError(f"{path}: has no file that ends in {', '.join(suffixes)}; {remedy}")
        if not from_folders:
            kinds = ", ".join(f"{suffix or 'no suffix'} {n:,}" for suffix, n in others[:5])
            what = f"files of other kinds ({kinds}{', ...' * (len(others) > 5)}; see --suffix)"
            left_out = {what: len(every) - len(walked)} if others else {}
            return file_source(spec, walked, fields, left_out=left_out)
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
    every = files_below(root, (".py",), _NOT_STDLIB) if (root / "os.py").is_file() else []
    # _sysconfigdata contains paths of the machine on which Python was built.
    files = [path for path in every if not path.name.startswith("_sysconfigdata")]
    if not files:
        raise UserError(
            f"{PYTHON_STDLIB}: this Python comes without the sources of its standard library "
            f"(looked in {root}); use a Python that has them, or a folder of your own text"
        )
    terms = f"PSF-2.0 (Python Software Foundation License), Python {platform.python_version()}"
    return file_source(PYTHON_STDLIB, files, Fields(), terms)
