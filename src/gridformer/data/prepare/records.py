"""Reads documents from records of any file format by key: text, pairs of texts, labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gridformer.data.prepare.reading import Cursor, Text, json_lines, text_file
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
        from gridformer.data.prepare.hf import open_table, table_items

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
        for key in self.options:
            if key not in present and key.partition(".")[0] not in present:
                raise self._missing(where, key, present)
        return sorted({k if k in present else k.partition(".")[0] for k in self.options})

    def items(self, record: Mapping[str, Any], where: str, skipped: Counter[str]) -> Iterator[Any]:
        """Yields the document of a record, or the pair, unless it is incomplete."""
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
