"""The text column of records, whatever file they come from."""

from __future__ import annotations

from gridformer.errors import DataError

NO_TEXT = "records without text"


def checked_text(value: object, where: str, text_key: str) -> str:
    """The text of a record; None counts as empty. Raises DataError for anything but text."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(
            f"{where}: '{text_key}' holds {type(value).__name__}, not text: choose another column "
            f"with --text-key"
        )
    return value


def missing_key(where: str, text_key: str, present: list[str]) -> DataError:
    """The error for records that lack the text column."""
    return DataError(
        f"{where}: has no '{text_key}'; name the text with --text-key, there are "
        f"{', '.join(sorted(present)) or 'no keys at all'}"
    )
