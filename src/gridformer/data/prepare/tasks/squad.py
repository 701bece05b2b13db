"""Reads the JSON files of SQuAD 1.1 and 2.0 (Rajpurkar et al. 2016 and 2018)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gridformer.data.examples_file import Question
from gridformer.utils.errors import DataError
from gridformer.utils.files import UnreadableError, read_json
from gridformer.utils.units import GIB

MISPLACED = "answers that are not at their place"
NO_CONTEXT = "questions without a context"


@dataclass(frozen=True)
class Asked:
    """A question with the place of its first answer.

    Attributes:
        question: The question.
        start: The character of the context at which the first answer begins; -1 if there is none.
    """

    question: Question
    start: int


def read_squad(path: Path, skipped: Counter[str]) -> Iterator[Asked]:
    """Yields the questions of a file.

    Args:
        path: The file.
        skipped: Counts questions that are left out.

    Raises:
        DataError: The file cannot be read or is not of this format.
    """
    try:
        raw = read_json(path, GIB)
    except UnreadableError as error:
        raise DataError(str(error)) from None
    try:
        articles = raw["data"]
        for article in articles:
            for paragraph in article["paragraphs"]:
                for asked in paragraph["qas"]:
                    found = _asked(paragraph["context"], asked, skipped)
                    if found is not None:
                        yield found
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: is not a file of SQuAD 1.1 or 2.0 ({type(error).__name__}: {error}); it has "
            "data, a list of articles with paragraphs, each with a context and qas"
        ) from None


def _asked(context: str, asked: dict[str, Any], skipped: Counter[str]) -> Asked | None:
    if not context.strip() or not asked["question"].strip():
        skipped[NO_CONTEXT] += 1
        return None
    answers = [] if asked.get("is_impossible", False) else asked["answers"]
    texts = tuple(one["text"] for one in answers)
    question = Question(str(asked["id"]), context, asked["question"].strip(), texts)
    if not answers:
        return Asked(question, -1)
    text, start = texts[0], int(answers[0]["answer_start"])
    if not text.strip() or context[start : start + len(text)] != text:
        skipped[MISPLACED] += 1
        return None
    return Asked(question, start)
