"""Reads documents from records of any file format by key: text, pairs of texts, labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gridformer.data.prepare.reading import Text, json_lines, text_file
from gridformer.data.tokenfolder import Kind
from gridformer.utils.errors import DataError

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
_INSTEAD = {"pairs": "", "labels": ": put it into folders, and use --labels-from-folders"}


def file_texts(path: Path, fields: Fields, skipped: Counter[str]) -> Iterator[Text]:
    """Yields the documents of a file: a text file is one, a table or JSON lines hold many."""
    if path.name.endswith(JSON_LINES):
        for where, record in json_lines(path, skipped):
            yield from record_texts(record, fields, where, skipped)
    elif path.name.endswith(TABLES):
        from gridformer.data.prepare.hf import open_table, table_texts

        yield from table_texts(open_table(path), fields, skipped)
    elif fields.kind == "text":
        yield from text_file(path, skipped)
    else:
        what = "pairs" if fields.pair else "labels"
        raise DataError(
            f"{path}: {what} are read from the records of {', '.join(RECORDS)} files, but "
            f"this is plain text" + _INSTEAD[what]
        )


@dataclass(frozen=True)
class Fields:
    """The keys of a record. `a.b` means key b within the value of a, unless that is a key."""

    text: str = "text"
    pair: tuple[str, str] | None = None
    label: str | None = None

    @property
    def kind(self) -> Kind:
        """The kind of documents that these keys give."""
        return "pairs" if self.pair else "labeled" if self.label else "text"

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
        if self.pair:
            return dict.fromkeys(self.pair, "--pair-keys")
        label = {self.label: "--label-key"} if self.label else {}
        return {self.text: "--text-key"} | label

    def columns(self, present: Sequence[str], where: str) -> list[str]:
        """Returns the columns of a table that these keys need."""
        for key, option in self.options.items():
            if key not in present and key.partition(".")[0] not in present:
                raise _missing_key(where, key, list(present), option)
        return sorted({k if k in present else k.partition(".")[0] for k in self.options})


def record_texts(
    record: Mapping[str, Any], fields: Fields, where: str, skipped: Counter[str]
) -> Iterator[Text]:
    """Yields the document of a record, or the pair, unless it is incomplete."""
    if fields.pair:
        one, other = (_text(record, key, fields, where).strip() for key in fields.pair)
        if one and other:
            yield Text(one, second=other)
        else:
            skipped[NO_PAIR] += 1
        return
    text = _text(record, fields.text, fields, where)
    if not text:
        skipped[NO_TEXT] += 1
        return
    label = _label(record, fields, where) if fields.label else None
    if label == "":
        skipped[NO_LABEL] += 1
        return
    yield Text(text, label=label)


def _text(record: Mapping[str, Any], key: str, fields: Fields, where: str) -> str:
    """Returns the text of a record, empty for None."""
    value = _value(record, key, fields, where)
    if not isinstance(value, str | None):
        raise DataError(
            f"{where}: '{key}' holds {type(value).__name__}, not text: choose another key "
            f"with {fields.options[key]}"
        )
    return value or ""


def _label(record: Mapping[str, Any], fields: Fields, where: str) -> str:
    """Returns the label of a record, empty for None."""
    assert fields.label is not None
    value = _value(record, fields.label, fields, where)
    if not isinstance(value, str | int | None):
        raise DataError(
            f"{where}: '{fields.label}' holds {type(value).__name__}; a label is a word or a whole "
            f"number: choose another key with --label-key"
        )
    return "" if value is None else str(value)


def _missing_key(where: str, key: str, present: list[str], option: str) -> DataError:
    what = {"--pair-keys": "the two texts", "--label-key": "the label"}.get(option, "the text")
    return DataError(
        f"{where}: has no '{key}'; name {what} with {option}, there are "
        f"{', '.join(sorted(present)) or 'no keys at all'}"
    )


def _value(record: Mapping[str, Any], key: str, fields: Fields, where: str) -> object:
    here: object = record
    if key in record:
        return record[key]
    for part in key.split("."):
        if not isinstance(here, Mapping) or part not in here:
            raise _missing_key(where, key, list(record), fields.options[key])
        here = here[part]
    return here
