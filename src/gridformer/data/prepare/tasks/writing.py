"""Writes folders of examples from the files of GLUE, SQuAD and RACE."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from gridformer.data.columns import LABEL_COLUMN, LABELS, Column
from gridformer.data.examples_file import Question, write_questions
from gridformer.data.prepare.documents import Document, write_documents
from gridformer.data.prepare.tasks.glue import GLUE, Text, read_glue
from gridformer.data.prepare.tasks.race import read_race
from gridformer.data.prepare.tasks.squad import Asked, read_squad
from gridformer.data.tokenfolder import SplitName, TokenFolder
from gridformer.data.tokenizer import Tokenizer
from gridformer.utils.errors import DataError, UserError

Example = TypeVar("Example")
_AT_A_TIME = 4096  # examples that are tokenized together
# The files of questions: those of SQuAD 2.0, and those of 1.1.
_SQUAD = {
    "train": ("train-v2.0.json", "train-v1.1.json"),
    "val": ("dev-v2.0.json", "dev-v1.1.json"),
}
_RACE = {"train": ("train",), "val": ("dev",)}
SPLITS: tuple[SplitName, ...] = ("train", "val")
FORMATS = (*GLUE, "squad", "race")


@dataclass(frozen=True)
class Found:
    """A data set that was found in a folder.

    Attributes:
        files: The file or folder of each split.
        documents: Yields the documents of a file of one split.
        columns: The columns of the documents.
        questions: Where the texts of validation questions are collected, if they are needed.
    """

    files: dict[SplitName, Path]
    documents: Callable[[SplitName, Path], Iterator[Document]]
    columns: dict[str, Column]
    questions: list[Question] | None = None


def prepare_task(
    kind: str,
    path: Path,
    out: Path,
    tokenizer: Tokenizer,
    overwrite: bool = False,
    on_documents: Callable[[int], None] = lambda n: None,
) -> TokenFolder:
    """Writes a folder of examples from a data set, whose splits are those of its files.

    Args:
        kind: One of FORMATS.
        path: The folder with the files of the data set, under the names with which it is
            distributed.
        out: The folder to write.
        tokenizer: The tokenizer of the model that is fine-tuned.
        overwrite: Whether to replace a token folder at `out`.
        on_documents: Called with the number of documents that are written.

    Raises:
        UserError: `out` cannot be used, or the format is unknown.
        DataError: A file is missing or cannot be read.
    """
    skipped: Counter[str] = Counter()
    found = _opened(kind, path, tokenizer, skipped)
    folder = write_documents(
        _counted(_all(found), on_documents),
        out,
        tokenizer=tokenizer,
        kind="examples",
        name=f"{kind}: {path}",
        columns=found.columns,
        skipped=skipped,
        overwrite=overwrite,
    )
    if found.questions is not None:
        write_questions(out, "val", found.questions)
    return folder


def _opened(kind: str, path: Path, tokenizer: Tokenizer, skipped: Counter[str]) -> Found:
    if kind in GLUE:
        task = GLUE[kind]
        files = {"train": (task.train,), "val": (task.val,)}
        texts = partial(_texts, tokenizer, lambda file: read_glue(file, task, skipped))
        columns = {"parts": Column(dtype="int32", width=2), LABELS: LABEL_COLUMN}
        return Found(_files(kind, path, files), texts, columns)
    if kind == "squad":
        questions: list[Question] = []
        answers = partial(_answers, tokenizer, questions, skipped)
        columns = {
            "parts": Column(dtype="int32", width=2),
            "answer": Column(dtype="int32", width=2),
        }
        return Found(_files(kind, path, _SQUAD), answers, columns, questions)
    if kind == "race":
        found = _files(kind, path, _RACE)
        first = next(read_race(found["train"], Counter()), None)
        n = len(first.continuations) if first else 4
        choices = partial(_choices, tokenizer, n, skipped)
        columns = {"parts": Column(dtype="int32", width=1 + n), "right": Column(dtype="int32")}
        return Found(found, choices, columns)
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


def _all(found: Found) -> Iterator[Document]:
    for split in SPLITS:
        yield from found.documents(split, found.files[split])


def _counted(documents: Iterable[Document], tell: Callable[[int], None]) -> Iterator[Document]:
    for number, document in enumerate(documents, 1):
        yield document
        if number % _AT_A_TIME == 0:
            tell(number)


def _in_batches(examples: Iterator[Example]) -> Iterator[list[Example]]:
    while batch := [*islice(examples, _AT_A_TIME)]:
        yield batch


def _texts(
    tokenizer: Tokenizer,
    read: Callable[[Path], Iterator[Text]],
    split: SplitName,
    file: Path,
) -> Iterator[Document]:
    for batch in _in_batches(read(file)):
        firsts = tokenizer.encode_batch([one.a for one in batch])
        seconds = tokenizer.encode_batch([one.b for one in batch])
        for one, a, b in zip(batch, firsts, seconds):
            values = {"parts": [len(a), len(b)]}
            size = len(one.a.encode()) + len(one.b.encode())
            yield Document([*a, *b], values, one.label, split, size)


def _choices(
    tokenizer: Tokenizer, n: int, skipped: Counter[str], split: SplitName, file: Path
) -> Iterator[Document]:
    for batch in _in_batches(read_race(file, skipped)):
        passages = _encoded_once(tokenizer, [one.passage for one in batch])
        for one, passage in zip(batch, passages):
            if len(one.continuations) != n:
                skipped[f"questions with another number of answers than {n}"] += 1
                continue
            rest = tokenizer.encode_batch(one.continuations)
            ids = [*passage, *(i for part in rest for i in part)]
            parts = [len(passage), *map(len, rest)]
            size = len(one.passage.encode()) + sum(len(text.encode()) for text in one.continuations)
            yield Document(ids, {"parts": parts, "right": one.right}, None, split, size)


def _encoded_once(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    once = [*dict.fromkeys(texts)]
    found = dict(zip(once, tokenizer.encode_batch(once)))
    return [found[text] for text in texts]


def _answers(
    tokenizer: Tokenizer,
    questions: list[Question],
    skipped: Counter[str],
    split: SplitName,
    file: Path,
) -> Iterator[Document]:
    for batch in _in_batches(read_squad(file, skipped)):
        asked = tokenizer.encode_batch([one.question.question for one in batch])
        once = [*dict.fromkeys(one.question.context for one in batch)]
        contexts = dict(zip(once, tokenizer.encode_with_offsets(once)))
        for one, question in zip(batch, asked):
            ids, offsets = contexts[one.question.context]
            place = _tokens_of(one, offsets)
            if split == "val":
                questions.append(one.question)
            values = {"parts": [len(question), len(ids)], "answer": place}
            size = len(one.question.question.encode()) + len(one.question.context.encode())
            yield Document([*question, *ids], values, None, split, size)


def _tokens_of(asked: Asked, offsets: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Returns the first and the last token of an answer in its context; (-1, -1) for none."""
    if asked.start < 0:
        return -1, -1
    begin, end = asked.start, asked.start + len(asked.question.answers[0].rstrip())
    inside = [i for i, (low, high) in enumerate(offsets) if low < end and high > begin]
    return (inside[0], inside[-1]) if inside else (-1, -1)
