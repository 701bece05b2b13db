"""Reads the folders of RACE (Lai et al. 2017): texts with questions, each with four answers.

A folder such as RACE/train contains the folders high and middle, whose .txt files are JSON:
{"article": ..., "questions": [...], "options": [[...], ...], "answers": ["B", ...], "id": ...}.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gridformer.utils.errors import DataError
from gridformer.utils.files import UnreadableError, read_json

INCOMPLETE = "incomplete questions"


@dataclass(frozen=True)
class ChoiceQuestion:
    """A passage, the question with each of its answers, and the number of the right one."""

    passage: str
    continuations: tuple[str, ...]
    right: int


def read_race(folder: Path, skipped: Counter[str]) -> Iterator[ChoiceQuestion]:
    """Yields the questions of all texts of a folder, ordered by the names of files.

    Args:
        folder: The folder.
        skipped: Counts questions that lack something.

    Raises:
        DataError: A file cannot be read or is not of this format, or there is none.
    """
    files = sorted(folder.rglob("*.txt"))
    if not files:
        raise DataError(f"{folder}: has no .txt files of RACE; name a folder such as RACE/train")
    for file in files:
        try:
            raw = read_json(file)
        except UnreadableError as error:
            raise DataError(str(error)) from None
        try:
            passage = raw["article"].strip()
            asked = list(zip(raw["questions"], raw["options"], raw["answers"], strict=True))
            for question, options, answer in asked:
                right = string.ascii_uppercase.find(answer.strip())
                if (
                    not passage
                    or not all(o.strip() for o in options)
                    or right not in range(len(options))
                ):
                    skipped[INCOMPLETE] += 1
                    continue
                yield ChoiceQuestion(passage, tuple(_filled(question, o) for o in options), right)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DataError(
                f"{file}: is not a text of RACE ({type(error).__name__}: {error}); it has article, "
                "questions, options and answers"
            ) from None


def _filled(question: str, option: str) -> str:
    """Returns a question with an answer in its blank, or after it."""
    question, option = question.strip(), option.strip()
    if "_" in question:
        return question.replace("_", option, 1)
    return f"{question} {option}".strip()
