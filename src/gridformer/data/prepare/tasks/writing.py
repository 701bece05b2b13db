"""Writes folders of examples from the files of GLUE, SQuAD and RACE."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gridformer.data.columns import LABEL_COLUMN, LABELS, Column
from gridformer.data.examples_file import Question, write_questions
from gridformer.data.prepare.documents import Making, SourcePart, prepare_documents
from gridformer.data.prepare.place import ReadingPlace
from gridformer.data.prepare.progress import PrepareProgress
from gridformer.data.prepare.reading import Reader
from gridformer.data.prepare.tasks.encoding import (
    Documents,
    ExampleEncoder,
    answers,
    choices,
    labeled_texts,
    numbered_texts,
)
from gridformer.data.prepare.tasks.glue import GLUE, Text, read_glue
from gridformer.data.prepare.tasks.race import ChoiceQuestion, read_race
from gridformer.data.prepare.tasks.squad import Asked, read_squad
from gridformer.data.prepare.tokenizing import PickledTokenizer
from gridformer.data.tokenfolder import SplitName, TokenFolder
from gridformer.data.tokenizer import Tokenizer
from gridformer.utils.errors import DataError, UserError

# The files of questions: those of SQuAD 2.0, and those of 1.1.
_SQUAD = {
    "train": ("train-v2.0.json", "train-v1.1.json"),
    "val": ("dev-v2.0.json", "dev-v1.1.json"),
}
_RACE = {"train": ("train",), "val": ("dev",)}
SPLITS: tuple[SplitName, ...] = ("train", "val")
FORMATS = (*GLUE, "squad", "race")


@dataclass(frozen=True)
class TaskFiles:
    """A data set that was found in a folder.

    Attributes:
        files: The file or folder of each split.
        read: Returns what reads the examples of a split from its file.
        chars: Returns the characters of an example.
        documents: Turns examples into documents.
        columns: The columns of the documents.
        questions: Reads the questions of a file as text, if an evaluation needs them.
    """

    files: dict[SplitName, Path]
    read: Callable[[SplitName, Path], Reader[Any]]
    chars: Callable[[Any], int]
    documents: Documents[Any]
    columns: dict[str, Column]
    questions: Callable[[Path], Iterator[Question]] | None = None


def prepare_task(
    kind: str,
    path: Path,
    out: Path,
    tokenizer: Tokenizer,
    *,
    workers: int | None = 1,
    overwrite: bool = False,
    on_progress: Callable[[PrepareProgress], None] = lambda progress: None,
) -> TokenFolder:
    """Writes a folder of examples from a data set, whose splits are those of its files.

    Args:
        kind: One of FORMATS.
        path: The folder with the files of the data set, under the names with which it is
            distributed.
        out: The folder to write.
        tokenizer: The tokenizer of the model that is fine-tuned.
        workers, overwrite, on_progress: See `gridformer.data.prepare.prepare.prepare_corpus`.

    Raises:
        UserError: `out` cannot be used, or the format is unknown.
        DataError: A file is missing or cannot be read.
    """
    found = _opened(kind, path)
    name = f"{kind}: {path}"
    parts = [
        SourcePart(name, found.read(split, file), split, _files_of(file))
        for split, file in found.files.items()
    ]

    def also(folder: Path) -> None:
        # A preparation that goes on does not read all of its files again, so this does.
        if found.questions is not None:
            for split, file in found.files.items():
                write_questions(folder, split, found.questions(file))

    making: Making[Any] = Making(
        "examples",
        lambda given: ExampleEncoder(PickledTokenizer.of(given), found.documents),
        found.chars,
        {"format": kind},
        found.columns,
        also,
    )
    return prepare_documents(
        parts,
        out,
        making,
        tokenizer,
        workers=workers,
        overwrite=overwrite,
        on_progress=on_progress,
    )


def _opened(kind: str, path: Path) -> TaskFiles:
    if kind in GLUE:
        task = GLUE[kind]
        files = {"train": (task.train,), "val": (task.val,)}
        columns = {"parts": Column(dtype="int32", width=2)}
        columns |= {LABELS: LABEL_COLUMN} if task.labels else {"value": Column(dtype="float32")}

        def rows(split: SplitName, file: Path) -> Reader[Text]:
            return lambda skipped, place: read_glue(file, task, skipped)

        return TaskFiles(
            _files(kind, path, files),
            rows,
            lambda one: len(one.a) + len(one.b),
            labeled_texts if task.labels else numbered_texts,
            columns,
        )
    if kind == "squad":
        columns = {
            "parts": Column(dtype="int32", width=2),
            "answer": Column(dtype="int32", width=2),
        }
        return TaskFiles(
            _files(kind, path, _SQUAD),
            _asked,
            lambda one: len(one.question.question) + len(one.question.context),
            answers,
            columns,
            _questions,
        )
    if kind == "race":
        found = _files(kind, path, _RACE)
        first = next(read_race(found["train"], Counter()), None)
        n = len(first.continuations) if first else 4
        columns = {"parts": Column(dtype="int32", width=1 + n), "right": Column(dtype="int32")}
        return TaskFiles(
            found,
            partial(_choices, n),
            lambda one: len(one.passage) + sum(map(len, one.continuations)),
            choices,
            columns,
        )
    raise UserError(f"--format {kind} is unknown: use one of {', '.join(FORMATS)}")


def _files(kind: str, path: Path, names: Mapping[str, Sequence[str]]) -> dict[SplitName, Path]:
    """Returns the first existing file of each split."""
    found: dict[SplitName, Path] = {}
    for split in SPLITS:
        there = [path / name for name in names[split] if (path / name).exists()]
        if not there:
            raise DataError(
                f"{path}: has no {' or '.join(names[split])}, which --format {kind} reads: name "
                "the folder that holds the files of the data set"
            )
        found[split] = there[0]
    return found


def _files_of(path: Path) -> tuple[Path, ...]:
    return tuple(sorted(path.rglob("*.txt"))) if path.is_dir() else (path,)


def _asked(split: SplitName, file: Path) -> Reader[Asked]:
    return lambda skipped, place: read_squad(file, skipped)


def _questions(file: Path) -> Iterator[Question]:
    return (one.question for one in read_squad(file, Counter()))


def _choices(n: int, split: SplitName, file: Path) -> Reader[ChoiceQuestion]:
    def read(skipped: Counter[str], place: ReadingPlace) -> Iterator[ChoiceQuestion]:
        for one in read_race(file, skipped):
            if len(one.continuations) == n:
                yield one
            else:
                skipped[f"questions with another number of answers than {n}"] += 1

    return read
