"""Texts beside tokens: what labels are called, and the questions of a folder with their answers.

labels.json in run directories is a list of the names of a classifier's labels. In a token folder
SPLIT.questions.jsonl has a `Question` a line for each document of the split, in its order.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
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
    """Returns the names of labels 0, 1, ... of a run directory; none if it has no labels.json."""
    file = folder / LABELS_FILE
    if not file.is_file():
        return ()
    try:
        names = read_json(file)
    except UnreadableError as error:
        raise DataError(f"{file}: no names of labels can be read ({error}): remove it") from None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{file}: is not a list of names of labels: remove it")
    return tuple(names)


@dataclass(frozen=True)
class Question:
    """A question, its context, and the right answers; none if the context does not answer it."""

    id: str
    context: str
    question: str
    answers: tuple[str, ...]


def without_questions(folder: Path, split: str) -> str:
    """Returns why answers to a split cannot be scored, or an empty string."""
    file = _file(folder, split)
    missing = f"{file}: is missing, with the right answers of the set: {_again(folder)}"
    return "" if file.is_file() else missing


def _file(folder: Path, split: str) -> Path:
    return folder / f"{split}.questions.jsonl"


def _again(folder: Path) -> str:
    return (
        "write the folder again with `gridformer prepare FOLDER --format squad --out "
        f"{shlex.quote(str(folder))} --overwrite`"
    )


def write_questions(folder: Path, split: str, questions: Iterable[Question]) -> None:
    """Writes the questions of one split, and replaces those that are there."""
    with _file(folder, split).open("w", encoding="utf-8") as file:
        for one in questions:
            file.write(json.dumps(asdict(one), ensure_ascii=False) + "\n")


def read_questions(folder: Path, split: str) -> list[Question]:
    """Reads the questions of one split."""
    file = _file(folder, split)
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
        records = [json.loads(line) for line in lines if line]
        return [Question(**{**one, "answers": tuple(one["answers"])}) for one in records]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{file}: cannot be read ({error}): {_again(folder)}") from None
