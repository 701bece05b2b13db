"""labels.json in run directories: what the numbers of a classifier's labels are called."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gridformer.utils.errors import DataError
from gridformer.utils.files import UnreadableError, read_json

LABELS_FILE: Final = "labels.json"


def write_label_names(folder: Path, names: Sequence[str]) -> None:
    """Writes the names of labels 0, 1, ... into a folder."""
    text = json.dumps([*names], indent=2, ensure_ascii=False)
    (folder / LABELS_FILE).write_text(text + "\n", encoding="utf-8")


def read_label_names(folder: Path) -> tuple[str, ...]:
    """Returns the names of labels 0, 1, ... of a run directory; none if it has no labels.json.

    Raises:
        DataError: The file is damaged.
    """
    file = folder / LABELS_FILE
    if not file.is_file():
        return ()
    try:
        found = read_json(file)
    except UnreadableError as error:
        raise DataError(f"{file}: no names of labels can be read ({error}): remove it") from None
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise DataError(f"{file}: is not a list of names of labels: remove it")
    return tuple(found)
