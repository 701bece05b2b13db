"""Hugging Face data sets, by name or from disk, read with the optional library `datasets`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gridformer.data.prepare.reading import Cursor
from gridformer.data.prepare.records import Fields, record_chunks
from gridformer.data.prepare.text_chunks import TextChunk
from gridformer.data.tokenfolder import Kind, PartEntry
from gridformer.utils.errors import DataError, UserError, require

_ROWS = 64  # rows to read at a time
_TIMEOUT_S = 30.0  # for a question to the hub


@dataclass(frozen=True)
class TableSource:
    """The rows of a data set, one document each; see `gridformer.data.prepare.sources.Source`.

    Attributes:
        name: The source as the user wrote it.
        license: The license, if known.
        table: The data set of `datasets`, streamed or not.
        fields: The keys of its rows.
        split: The split that the user named.
        paths: The files of a data set on this machine, perhaps with those of other splits.
        revision: What changes with the rows beside the files: the fingerprint of a saved data set,
            or the commit of one on the hub. None if it has none that is known.
    """

    name: str
    license: str | None
    table: Any
    fields: Fields
    split: str
    paths: tuple[Path, ...] = ()
    revision: str | None = None
    n_bytes: int | None = None
    parts: tuple[PartEntry, ...] = ()

    @property
    def kind(self) -> Kind:
        return self.fields.kind

    @property
    def languages(self) -> tuple[str, str] | None:
        return self.fields.languages

    def chunks(self, skipped: Counter[str], cursor: Cursor | None = None) -> Iterator[TextChunk]:
        """Yields the chunks from the row after cursor.mark on."""
        return rows_of(self.name, self.table, self.fields, skipped, cursor)

    def sample(self) -> Iterator[TextChunk]:
        return self.chunks(Counter())


def hub_source(spec: str, split: str, fields: Fields) -> TableSource:
    """Opens `hf:NAME` or `hf:NAME/CONFIG` for streaming; NAME is a hub name or a local folder.

    Args:
        spec: The name, with `hf:` before it.
        split: The split to read.
        fields: The keys of its rows.

    Raises:
        UserError: `datasets` is not installed, or there is no such data set, configuration or
            split.
    """
    datasets = _library(spec)
    name = spec.removeprefix("hf:").rstrip("/")
    parts = name.split("/")
    # `a/b` may be the data set b of the owner a, or else the configuration b of a.
    tries: list[tuple[str, str | None]] = [(name, None)]
    if len(parts) > 1 and not Path(name).exists():
        tries = [(name, None)] if len(parts) == 2 else []
        tries.append(("/".join(parts[:-1]), parts[-1]))
    problems = []
    for path, config in tries:
        try:
            # Releases of datasets before 4 can run a data set's own Python code; newer ones ignore
            # the argument.
            table = datasets.load_dataset(
                path, config, split=split, streaming=True, trust_remote_code=False
            )
        # Its errors have no common base class: not found, offline, no such configuration or split.
        except Exception as error:
            problems.append(_reason(error))
            continue
        there = Path(path).exists()
        return TableSource(
            spec,
            _license(table),
            table,
            fields,
            split,
            paths=_files_below(Path(path)) if there else (),
            revision=None if there else _commit(path),
        )
    raise UserError(f"{spec}: {'; '.join(dict.fromkeys(problems))}")


def is_saved(folder: Path) -> bool:
    """Returns whether a folder was written by `save_to_disk` of `datasets`."""
    one = all((folder / name).is_file() for name in ("dataset_info.json", "state.json"))
    return one or (folder / "dataset_dict.json").is_file()


def saved_source(folder: Path, name: str, split: str, fields: Fields) -> TableSource:
    """Opens a folder that `save_to_disk` of `datasets` wrote.

    Args:
        folder: The folder.
        name: What messages call the source.
        split: The split to read; a data set that was saved without splits is read whole.
        fields: The keys of its rows.

    Raises:
        UserError: `datasets` is not installed, or there is no such split.
        DataError: The data set cannot be loaded.
    """
    datasets = _library(name)
    try:
        table = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise DataError(
            f"{folder}: is not a data set that can be loaded ({_reason(error)})"
        ) from error
    if isinstance(table, dict):
        if split not in table:
            raise UserError(f"{name}: has no split '{split}'; use --split {' or '.join(table)}")
        table, folder = table[split], folder / split
    return TableSource(
        name,
        _license(table),
        table,
        fields,
        split,
        paths=_files_below(folder, (".arrow", ".json")),
        revision=getattr(table, "_fingerprint", None),
    )


def table_chunks(path: Path, fields: Fields, skipped: Counter[str]) -> Iterator[TextChunk]:
    """Yields the documents of one file of a table; see `open_table`."""
    return rows_of(str(path), open_table(path), fields, skipped)


def open_table(path: Path) -> Any:
    """Opens one .parquet, .arrow, .csv, .tsv or .json file for streaming.

    Raises:
        UserError: `datasets` is not installed.
        DataError: The file cannot be read.
    """
    datasets = _library(str(path))
    kind, more = ("csv", {"sep": "\t"}) if path.suffix == ".tsv" else (path.suffix[1:], {})
    try:
        return datasets.load_dataset(
            kind, data_files=[str(path)], split="train", streaming=True, **more
        )
    except Exception as error:
        raise DataError(f"{path}: cannot be read ({_reason(error)})") from error


def rows_of(
    name: str,
    table: Any,
    fields: Fields,
    skipped: Counter[str],
    cursor: Cursor | None = None,
) -> Iterator[TextChunk]:
    """Yields the documents of the rows of a table.

    Args:
        name: What messages call the table.
        table: A data set of `datasets`, streamed or not.
        fields: The columns that are read.
        skipped: Counts the rows that are left out.
        cursor: Where to begin; it is told of places where reading can begin again.

    Raises:
        DataError: The table lacks a column, or a row cannot be read.
    """
    columns = table.column_names
    if columns is not None:
        # Only these columns are read.
        table = table.select_columns(fields.columns(columns, name))
    names = _label_names(table, fields.label)
    for number, record in records(name, table, skipped, cursor or Cursor()):
        label = record.get(fields.label) if fields.label and names else None
        if isinstance(label, int):
            # Data sets without labels write a number below 0 for None.
            record[fields.label] = names[label] if 0 <= label < len(names) else None
        yield from record_chunks(record, fields, f"{name}, row {number}", skipped)


def records(
    name: str, table: Any, skipped: Counter[str], cursor: Cursor
) -> Iterator[tuple[int, dict[Any, Any]]]:
    """Yields the number and the values of each row after cursor.mark.

    Args:
        name: The name of the table, for errors.
        table: The table.
        skipped: What is left out so far, which `cursor` is told.
        cursor: Where to begin; it is told of the marks that reading passes.

    Raises:
        DataError: Reading failed.
    """
    if hasattr(table, "to_iterable_dataset"):
        table = table.to_iterable_dataset()  # which can begin in the middle
    done = 0
    if cursor.mark:
        done = cursor.mark["rows"]
        table.load_state_dict(cursor.mark["state"])
    batches = iter(table.iter(batch_size=_ROWS))
    while True:
        try:
            batch = next(batches, None)
        # A network failure, a damaged file: these have no common base class either.
        except Exception as error:
            raise DataError(
                f"{name}: reading failed after {done} rows ({_reason(error)})"
            ) from error
        if batch is None:
            return
        keys = list(batch)
        for values in zip(*batch.values()):
            yield done, dict(zip(keys, values))
            done += 1
        if hasattr(table, "state_dict"):  # since release 2.21 of datasets
            cursor.reached({"rows": done, "state": table.state_dict()}, skipped)


def _label_names(table: Any, label: str | None) -> list[str]:
    """Returns the names of label numbers, if the data set has them."""
    feature = (table.features or {}).get(label) if label else None
    return list(getattr(feature, "names", None) or [])


def _files_below(root: Path, suffixes: tuple[str, ...] = ("",)) -> tuple[Path, ...]:
    """Returns a data set's files, in order."""
    found = [root] if root.is_file() else []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        # `datasets` caches what other programs make of a saved data set in files beside it.
        own = (name for name in names if not name.startswith((".", "cache-")))
        found += [Path(folder, name) for name in own if name.endswith(suffixes)]
    return tuple(sorted(path for path in found if path.is_file()))


def _commit(name: str) -> str | None:
    """Returns the newest commit of a data set on the hub, or None if the hub does not tell it."""
    from huggingface_hub import HfApi  # which `datasets` needs, too

    try:
        return HfApi().dataset_info(name, timeout=_TIMEOUT_S).sha
    # Offline, not found, not a name: its errors have no common base class.
    except Exception:
        return None


def _license(table: Any) -> str | None:
    """Returns the license that the data set states; some list several."""
    found = table.info.license
    return (found if isinstance(found, str) else ", ".join(found or ())) or None


def _library(what: str) -> Any:
    require("datasets", what, "hf")
    import datasets

    return datasets


def _reason(error: Exception) -> str:
    """Returns the beginning of a library's exception on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + "..."
