"""Reads documents from records by key: JSON lines, and tables and data sets with `datasets`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gridformer.data.chat import messages_of
from gridformer.data.prepare.reading import (
    Cursor,
    Source,
    Text,
    files_below,
    json_lines,
    text_file,
)
from gridformer.data.tokenfolder import Kind
from gridformer.utils.errors import DataError, UserError, require

NO_TEXT = "records without text"
NO_PAIR = "pairs without one of the texts"
NO_LABEL = "records without a label"
JSON_LINES = (".jsonl", ".jsonl.gz")
TABLES = (".parquet", ".arrow", ".csv", ".tsv", ".json")
RECORDS = (*JSON_LINES, *TABLES)
# Of a folder, .json and the like are read only if --suffix names them: they may hold settings.
FOLDER_RECORDS = (*JSON_LINES, ".parquet", ".arrow")
TEXT_SUFFIXES = (
    *(".txt", ".txt.gz", ".text", ".md", ".rst", ".tex", ".py", ".c", ".h", ".cc", ".cpp"),
    *(".hpp", ".java", ".js", ".ts", ".go", ".rs", ".sh"),
)
DEFAULT_SUFFIXES = (*TEXT_SUFFIXES, *FOLDER_RECORDS)
_ROWS = 64  # of a table to read at a time
_TIMEOUT_S = 30.0  # for a question to the hub
# What is read from records alone, and what to do with plain text instead.
_INSTEAD: dict[Kind, tuple[str, str]] = {
    "pairs": ("pairs", ""),
    "labeled": ("labels", ": put it into folders, and use --labels-from-folders"),
    "chat": ("conversations", ""),
}


def file_items(path: Path, fields: Fields, skipped: Counter[str]) -> Iterator[Any]:
    """Yields the documents of a file: a text file is one, a table or JSON lines hold many."""
    if path.name.endswith(JSON_LINES):
        for where, record in json_lines(path, skipped):
            yield from fields.items(record, where, skipped)
    elif path.name.endswith(TABLES):
        yield from table_items(str(path), open_table(path), fields, skipped, Cursor())
    elif fields.kind == "text":
        yield from text_file(path, skipped)
    else:
        what, instead = _INSTEAD[fields.kind]
        raise DataError(
            f"{path}: {what} are read from the records of {', '.join(RECORDS)} files, but "
            f"this is plain text{instead}"
        )


@dataclass(frozen=True)
class Fields:
    """The keys of a record. `a.b` means key b within the value of a, unless that is a key."""

    text: str = "text"
    pair: tuple[str, str] | None = None
    label: str | None = None
    chat: bool = False  # whether records are conversations, whose keys are given

    @property
    def kind(self) -> Kind:
        """The kind of documents that these keys give."""
        return (
            "chat" if self.chat else "pairs" if self.pair else "labeled" if self.label else "text"
        )

    @property
    def languages(self) -> tuple[str, str] | None:
        """The names of a pair's two keys, which usually name languages."""
        if not self.pair:
            return None
        one, other = (key.rpartition(".")[2] for key in self.pair)
        return one, other

    @property
    def options(self) -> dict[str, str]:
        """Maps each key that is read to the command-line option that sets it."""
        if self.chat:
            return {}
        if self.pair:
            return dict.fromkeys(self.pair, "--pair-keys")
        label = {self.label: "--label-key"} if self.label else {}
        return {self.text: "--text-key"} | label

    def columns(self, present: Sequence[str], where: str) -> list[str]:
        """Returns the columns of a table that these keys need."""
        for key in self.options:
            if key not in present and key.partition(".")[0] not in present:
                raise self._missing(where, key, present)
        wanted = present if self.chat else self.options
        return sorted({k if k in present else k.partition(".")[0] for k in wanted})

    def items(self, record: Mapping[str, Any], where: str, skipped: Counter[str]) -> Iterator[Any]:
        """Yields the document, pair or conversation of a record, unless it is incomplete."""
        if self.chat:
            yield messages_of(record, where)
            return
        if self.pair:
            one, other = (self._text(record, key, where).strip() for key in self.pair)
            if one and other:
                yield Text(one, second=other)
            else:
                skipped[NO_PAIR] += 1
            return
        text = self._text(record, self.text, where)
        label: str | None = None
        if text and self.label:
            value = self._value(record, self.label, where)
            if not isinstance(value, str | int | None):
                raise DataError(
                    f"{where}: '{self.label}' holds {type(value).__name__}; a label is a word or a "
                    f"whole number: choose another key with --label-key"
                )
            label = "" if value is None else str(value)
        if text and label != "":
            yield Text(text, label=label)
        else:
            skipped[NO_LABEL if text else NO_TEXT] += 1

    def _text(self, record: Mapping[str, Any], key: str, where: str) -> str:
        """Returns the text of a record, empty for None."""
        value = self._value(record, key, where)
        if not isinstance(value, str | None):
            raise DataError(
                f"{where}: '{key}' holds {type(value).__name__}, not text: choose another key "
                f"with {self.options[key]}"
            )
        return value or ""

    def _value(self, record: Mapping[str, Any], key: str, where: str) -> object:
        if key in record:
            return record[key]
        value: object = record
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise self._missing(where, key, record)
            value = value[part]
        return value

    def _missing(self, where: str, key: str, present: Iterable[str]) -> DataError:
        option = self.options[key]
        what = {"--pair-keys": "the two texts", "--label-key": "the label"}.get(option, "the text")
        return DataError(
            f"{where}: has no '{key}'; name {what} with {option}, there are "
            f"{', '.join(sorted(present)) or 'no keys at all'}"
        )


# --------------------------------------------------------------------------- tables and data sets


def hub_source(spec: str, split: str, fields: Fields) -> Source[Any]:
    """Opens `hf:NAME` or `hf:NAME/CONFIG` for streaming; NAME is a hub name or a local folder."""
    datasets = _library(spec)
    name = spec.removeprefix("hf:").rstrip("/")
    owner, _, last = name.rpartition("/")
    # `a/b` may be the data set b of the owner a, or else the configuration b of a.
    local = Path(name).exists()
    tries: list[tuple[str, str | None]] = [(name, None)] if local or "/" not in owner else []
    if owner and not local:
        tries.append((owner, last))
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
    """Returns a data set as a source; `version` changes with the rows, if it is known."""
    # Perhaps with those of other splits; none of a data set that is streamed from the hub.
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
