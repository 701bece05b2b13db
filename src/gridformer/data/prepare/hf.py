"""Tables and data sets of Hugging Face, by name or from disk, read with the library `datasets`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gridformer.data.prepare.reading import Cursor, Text
from gridformer.data.prepare.records import Fields, record_texts
from gridformer.utils.errors import DataError, UserError, require

_ROWS = 64  # rows to read at a time
_TIMEOUT_S = 30.0  # for a question to the hub


@dataclass(frozen=True)
class Table:
    """A data set of `datasets`.

    Attributes:
        name: The source as the user wrote it.
        data: The data set, streamed or not.
        files: The files of a data set on this machine, perhaps with those of other splits.
        revision: What changes with the rows beside the files: the split, and the fingerprint of a
            saved data set or the commit of one on the hub, if it has one that is known.
    """

    name: str
    data: Any
    files: tuple[Path, ...] = ()
    license: str | None = None
    revision: object = None


def hub_table(spec: str, split: str) -> Table:
    """Opens `hf:NAME` or `hf:NAME/CONFIG` for streaming; NAME is a hub name or a local folder."""
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
        files = _files_below(Path(path)) if there else ()
        revision = (split, None if there else _commit(path))
        return Table(spec, table, files, _license(table), revision)
    raise UserError(f"{spec}: {'; '.join(dict.fromkeys(problems))}")


def is_saved(folder: Path) -> bool:
    """Returns whether a folder was written by `save_to_disk` of `datasets`."""
    one = all((folder / name).is_file() for name in ("dataset_info.json", "state.json"))
    return one or (folder / "dataset_dict.json").is_file()


def saved_table(folder: Path, name: str, split: str) -> Table:
    """Opens a folder that `save_to_disk` of `datasets` wrote."""
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
    files = _files_below(folder, (".arrow", ".json"))
    return Table(name, table, files, _license(table), (split, getattr(table, "_fingerprint", None)))


def open_table(path: Path) -> Table:
    """Opens one .parquet, .arrow, .csv, .tsv or .json file for streaming."""
    datasets = _library(str(path))
    kind, more = ("csv", {"sep": "\t"}) if path.suffix == ".tsv" else (path.suffix[1:], {})
    try:
        data = datasets.load_dataset(
            kind, data_files=[str(path)], split="train", streaming=True, **more
        )
    except Exception as error:
        raise DataError(f"{path}: cannot be read ({_reason(error)})") from error
    return Table(str(path), data, (path,))


def table_texts(
    table: Table, fields: Fields, skipped: Counter[str], cursor: Cursor | None = None
) -> Iterator[Text]:
    """Yields the documents of the rows of a table."""
    data, columns = table.data, table.data.column_names
    if columns is not None:
        data = data.select_columns(fields.columns(columns, table.name))
    feature = (data.features or {}).get(fields.label) if fields.label else None
    names = list(getattr(feature, "names", None) or [])
    for where, record in records(table.name, data, skipped, cursor or Cursor()):
        label = record.get(fields.label) if names else None
        if isinstance(label, int):
            # Data sets without labels write a number below 0 for None.
            record[fields.label] = names[label] if 0 <= label < len(names) else None
        yield from record_texts(record, fields, where, skipped)


def records(
    name: str, data: Any, skipped: Counter[str], cursor: Cursor
) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yields the values of each row after cursor.mark, with the place of the row for errors."""
    if hasattr(data, "to_iterable_dataset"):
        data = data.to_iterable_dataset()  # which can begin in the middle
    done = 0
    if cursor.mark:
        done = cursor.mark["rows"]
        data.load_state_dict(cursor.mark["state"])
    batches = iter(data.iter(batch_size=_ROWS))
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
            yield f"{name}, row {done}", dict(zip(keys, values))
            done += 1
        if hasattr(data, "state_dict"):  # since release 2.21 of datasets
            cursor.reached({"rows": done, "state": data.state_dict()}, skipped)


def _files_below(root: Path, suffixes: tuple[str, ...] = ("",)) -> tuple[Path, ...]:
    """Returns a data set's files, in order."""
    files = [root] if root.is_file() else []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        # `datasets` caches what other programs make of a saved data set in files beside it.
        own = (name for name in names if not name.startswith((".", "cache-")))
        files += [Path(folder, name) for name in own if name.endswith(suffixes)]
    return tuple(sorted(path for path in files if path.is_file()))


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
    said = table.info.license
    return (said if isinstance(said, str) else ", ".join(said or ())) or None


def _library(what: str) -> Any:
    require("datasets", what, "hf")
    import datasets

    return datasets


def _reason(error: Exception) -> str:
    """Returns the beginning of a library's exception on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + "..."
