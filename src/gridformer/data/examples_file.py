"""The questions of a folder as text, which an evaluation compares its answers with.

SPLIT.questions.jsonl has one JSON object a line for each document of the split, in its order:
{"id": ..., "context": ..., "question": ..., "answers": [...]}, with no answers if there is none.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from gridformer.utils.errors import DataError


@dataclass(frozen=True)
class Question:
    """A question, its context, and the right answers; none if the context does not answer it."""

    id: str
    context: str
    question: str
    answers: tuple[str, ...]


def questions_name(split: str) -> str:
    """Returns the name of the file that holds the questions of a split."""
    return f"{split}.questions.jsonl"


def without_questions(folder: Path, split: str) -> str:
    """Returns why answers to a split cannot be scored, or an empty string."""
    file = folder / questions_name(split)
    if file.is_file():
        return ""
    return f"{file}: is missing, with the right answers of the set: {_again(folder)}"


def _again(folder: Path) -> str:
    return (
        "write the folder again with `gridformer prepare FOLDER --format squad --out "
        f"{shlex.quote(str(folder))} --overwrite`"
    )


def write_questions(folder: Path, split: str, questions: Iterable[Question]) -> None:
    """Writes the questions of one split, and replaces those that are there."""
    with (folder / questions_name(split)).open("w", encoding="utf-8") as file:
        for one in questions:
            file.write(json.dumps(asdict(one), ensure_ascii=False) + "\n")


def read_questions(folder: Path, split: str) -> list[Question]:
    """Reads the questions of one split.

    Raises:
        DataError: The file is missing or damaged.
    """
    file = folder / questions_name(split)
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
        found = [json.loads(line) for line in lines if line]
        return [Question(**{**one, "answers": tuple(one["answers"])}) for one in found]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{file}: cannot be read ({error}): {_again(folder)}") from None
