"""Reads the tab-separated files of GLUE (Wang et al. 2019), as they are distributed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gridformer.utils.errors import DataError
from gridformer.utils.files import UnreadableError, read_text
from gridformer.utils.units import GIB

BAD_ROWS = "incomplete rows"


@dataclass(frozen=True)
class Text:
    """A text, or a pair of texts, and its label, or a number as it was written."""

    a: str
    b: str
    label: str


@dataclass(frozen=True)
class GlueTask:
    """The columns and labels of one data set of GLUE.

    Attributes:
        train: The file of training examples.
        val: The file of validation examples.
        columns: The columns of the first text, of the second one if there is one, and of the label.
        labels: The labels, in the order of their numbers; none if the last column has numbers.
        header: Whether the first row names the columns; otherwise columns are numbers.
    """

    train: str
    val: str
    columns: tuple[str, ...]
    labels: tuple[str, ...]
    header: bool = True


def _mnli(val: str) -> GlueTask:
    labels = ("contradiction", "entailment", "neutral")
    return GlueTask("train.tsv", val, ("sentence1", "sentence2", "gold_label"), labels)


GLUE: dict[str, GlueTask] = {
    "mnli": _mnli("dev_matched.tsv"),
    "mnli-mismatched": _mnli("dev_mismatched.tsv"),
    "qqp": GlueTask("train.tsv", "dev.tsv", ("question1", "question2", "is_duplicate"), ("0", "1")),
    "qnli": GlueTask(
        "train.tsv",
        "dev.tsv",
        ("question", "sentence", "label"),
        ("entailment", "not_entailment"),
    ),
    "rte": GlueTask(
        "train.tsv",
        "dev.tsv",
        ("sentence1", "sentence2", "label"),
        ("entailment", "not_entailment"),
    ),
    "mrpc": GlueTask("train.tsv", "dev.tsv", ("#1 String", "#2 String", "Quality"), ("0", "1")),
    "sst-2": GlueTask("train.tsv", "dev.tsv", ("sentence", "label"), ("0", "1")),
    "sts-b": GlueTask("train.tsv", "dev.tsv", ("sentence1", "sentence2", "score"), ()),
    "cola": GlueTask("train.tsv", "dev.tsv", ("3", "1"), ("0", "1"), header=False),
}


def read_glue(path: Path, task: GlueTask, skipped: Counter[str]) -> Iterator[Text]:
    """Yields the examples of a file.

    Args:
        path: The file.
        task: The data set that it belongs to.
        skipped: Counts rows without a text or with a label that is unknown, such as `-` in MNLI's
            files.

    Raises:
        DataError: The file cannot be read, lacks a column, or has no usable row.
    """
    try:
        text = read_text(path, GIB).removeprefix("\ufeff")
    except UnreadableError as error:
        raise DataError(str(error)) from None
    lines = text.split("\n")  # splitlines would also split at other separators of Unicode
    rows = [line.rstrip("\r").split("\t") for line in lines if line.strip()]
    places, rows = _places(path, task, rows)
    n = 0
    for row in rows:
        values = [row[place].strip() if place < len(row) else "" for place in places]
        *texts, label = values
        if not all(texts) or not _known(label, task):
            skipped[BAD_ROWS] += 1
            continue
        n += 1
        yield Text(texts[0], texts[1] if len(texts) > 1 else "", label)
    if not n:
        raise DataError(
            f"{path}: no row has texts and {_wanted(task)}: it is not a file of this data set with "
            f"{'labels' if task.labels else 'scores'}"
        )


def _known(label: str, task: GlueTask) -> bool:
    """Returns whether a row has a label of the data set, or a finite number."""
    if task.labels:
        return label in task.labels
    try:
        return math.isfinite(float(label))
    except ValueError:
        return False


def _wanted(task: GlueTask) -> str:
    return f"one of the labels {', '.join(task.labels)}" if task.labels else "a number"


def _places(path: Path, task: GlueTask, rows: list[list[str]]) -> tuple[list[int], list[list[str]]]:
    """Returns the numbers of the columns, and the rows without the header."""
    if not task.header:
        return [int(column) for column in task.columns], rows
    names = rows[0] if rows else []
    missing = [column for column in task.columns if column not in names]
    if missing:
        raise DataError(
            f"{path}: has no column {', '.join(missing)}, but {', '.join(names) or 'nothing'}: it "
            "is not a file of this data set"
        )
    return [names.index(column) for column in task.columns], rows[1:]
