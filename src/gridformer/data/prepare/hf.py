"""Tables and data sets of Hugging Face, by name or from disk, read with the library `datasets`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gridformer.data.prepare.reading import Cursor, Source, files_below
from gridformer.data.prepare.records import Fields
from gridformer.utils.errors import DataError, UserError, require

_ROWS = 64  # rows to read at a time
_TIMEOUT_S = 30.0  # for a question to the hub


def hub_source(spec: str, split: str, fields: Fields) -> Source[Any]:
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
        return _source(spec, table, fields, Path(path), split, None if there else _commit(path))
    raise UserError(f"{spec}: {'; '.join(dict.fromkeys(problems))}")


def is_saved(folder: Path) -> bool:
    """Returns whether a folder was written by `save_to_disk` of `datasets`."""
    one = all((folder / name).is_file() for name in ("dataset_info.json", "state.json"))
    return one or (folder / "dataset_dict.json").is_file()


def saved_source(folder: Path, name: str, split: str, fields: Fields) -> Source[Any]:
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
    fingerprint = getattr(table, "_fingerprint", None)
    return _source(name, table, fields, folder, split, fingerprint, (".arrow", ".json"))


def _source(
    name: str,
    table: Any,
    fields: Fields,
    folder: Path,
    split: str,
    version: str | None,
    suffixes: tuple[str, ...] = ("",),
) -> Source[Any]:
    """Returns the rows of a data set as a source.

    Args:
        folder: Where its files are, perhaps with those of other splits, if they are here.
        version: What changes with the rows beside the files, if it is known.
    """
    files = [folder] if folder.is_file() else files_below(folder, suffixes)
    license = table.info.license  # some list several
    return Source(
        name,
        lambda skipped, cursor: table_items(name, table, fields, skipped, cursor),
        # `datasets` caches what other programs make of a saved data set in files beside it.
        files=tuple(file for file in files if not file.name.startswith("cache-")),
        kind=fields.kind,
        languages=fields.languages,
        license=(license if isinstance(license, str) else ", ".join(license or ())) or None,
        revision=repr((fields, split, version)),
        options=tuple(fields.options.values()),
    )


def open_table(path: Path) -> Any:
    """Opens one .parquet, .arrow, .csv, .tsv or .json file for streaming."""
    datasets = _library(str(path))
    kind, more = ("csv", {"sep": "\t"}) if path.suffix == ".tsv" else (path.suffix[1:], {})
    try:
        return datasets.load_dataset(
            kind, data_files=[str(path)], split="train", streaming=True, **more
        )
    except Exception as error:
        raise DataError(f"{path}: cannot be read ({_reason(error)})") from error


def table_items(
    name: str, data: Any, fields: Fields, skipped: Counter[str], cursor: Cursor
) -> Iterator[Any]:
    """Yields the documents of the rows of a table after cursor.mark."""
    if data.column_names is not None:
        data = data.select_columns(fields.columns(data.column_names, name))
    feature = (data.features or {}).get(fields.label) if fields.label else None
    names = list(getattr(feature, "names", None) or [])
    for where, record in _records(name, data, skipped, cursor):
        label = record.get(fields.label) if names else None
        if isinstance(label, int):
            # Data sets without labels write a number below 0 for None.
            record[fields.label] = names[label] if 0 <= label < len(names) else None
        yield from fields.items(record, where, skipped)


def _records(
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


def _commit(name: str) -> str | None:
    """Returns the newest commit of a data set on the hub, or None if the hub does not tell it."""
    from huggingface_hub import HfApi  # which `datasets` needs, too

    try:
        return HfApi().dataset_info(name, timeout=_TIMEOUT_S).sha
    # Offline, not found, not a name: its errors have no common base class.
    except Exception:
        return None


def _library(what: str) -> Any:
    require("datasets", what, "hf")
    import datasets

    return datasets


def _reason(error: Exception) -> str:
    """Returns the beginning of a library's exception on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + "..."
