"""Reads documents from records of any file format by key: text, pairs of texts, labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gridformer.data.prepare.text_chunks import TextChunk, labeled, text_chunks
from gridformer.data.tokenfolder import Kind
from gridformer.utils.errors import DataError

NO_TEXT = "records without text"
NO_PAIR = "pairs without one of the texts"
NO_LABEL = "records without a label"


@dataclass(frozen=True)
class Fields:
    """The keys of a record. `a.b` means key b within the value of a, unless a key is named `a.b`.

    Attributes:
        text: The key of the document, unless `pair` is given.
        pair: The keys of a pair's two texts.
        label: The key of the document's label, if it has one.
    """

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
        return (_last(self.pair[0]), _last(self.pair[1])) if self.pair else None

    @property
    def options(self) -> dict[str, str]:
        """Maps each key that is read to the command-line option that sets it."""
        if self.pair:
            return dict.fromkeys(self.pair, "--pair-keys")
        label = {self.label: "--label-key"} if self.label else {}
        return {self.text: "--text-key"} | label

    def columns(self, present: Sequence[str], where: str) -> list[str]:
        """Returns the columns of a table that these keys need.

        Args:
            present: The columns of the table.
            where: The name of the table, for errors.

        Raises:
            DataError: A column is missing.
        """
        for key, option in self.options.items():
            if key not in present and key.partition(".")[0] not in present:
                raise missing_key(where, key, list(present), option)
        return sorted({k if k in present else k.partition(".")[0] for k in self.options})


def record_chunks(
    record: Mapping[str, Any], fields: Fields, where: str, skipped: Counter[str]
) -> Iterator[TextChunk]:
    """Yields the chunks of a record's document, or of the two documents of a pair.

    Args:
        record: The record.
        fields: The keys to read.
        where: The file and place of the record, for errors.
        skipped: Counts incomplete records, which yield nothing.

    Raises:
        DataError: A key is missing, or its value has the wrong type.
    """
    if fields.pair:
        texts = [
            checked_text(_value(record, key, fields, where), where, key, "--pair-keys").strip()
            for key in fields.pair
        ]
        if not all(texts):
            skipped[NO_PAIR] += 1
            return
        for text in texts:
            yield from text_chunks([text])
        return
    text = checked_text(_value(record, fields.text, fields, where), where, fields.text)
    if not text:
        skipped[NO_TEXT] += 1
        return
    label = None
    if fields.label:
        label = _checked_label(_value(record, fields.label, fields, where), where, fields.label)
        if not label:
            skipped[NO_LABEL] += 1
            return
    yield from labeled(text_chunks([text]), label)


def checked_text(value: object, where: str, key: str, option: str = "--text-key") -> str:
    """Returns the text of a record, empty for None.

    Args:
        value: The value in the record.
        where: The file and place of the record, for errors.
        key: The key of the value, for errors.
        option: The command-line option that sets the key, for errors.

    Raises:
        DataError: The value is neither text nor None.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(
            f"{where}: '{key}' holds {type(value).__name__}, not text: choose another key "
            f"with {option}"
        )
    return value


def missing_key(where: str, key: str, present: list[str], option: str = "--text-key") -> DataError:
    """Returns the error for records that lack a key."""
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
            raise missing_key(where, key, list(record), fields.options[key])
        here = here[part]
    return here


def _checked_label(value: object, where: str, key: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str | int):
        raise DataError(
            f"{where}: '{key}' holds {type(value).__name__}; a label is a word or a whole number: "
            f"choose another key with --label-key"
        )
    return str(value)


def _last(key: str) -> str:
    return key.rpartition(".")[2]
