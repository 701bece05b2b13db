"""Writes folders of examples from the files of data sets for fine-tuning, as they are distributed.

They are the tab-separated files of GLUE (Wang et al. 2019), the JSON files of SQuAD 1.1 and 2.0
(Rajpurkar et al. 2016 and 2018), and the folders of RACE (Lai et al. 2017), whose .txt files are
{"article": ..., "questions": [...], "options": [[...], ...], "answers": ["B", ...], "id": ...}.
"""

from __future__ import annotations

import math
import string
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Unpack

import numpy as np

from gridformer.data.prepare.reading import Cursor, Source
from gridformer.data.prepare.split_file import Document
from gridformer.data.prepare.writer import (
    EncodedBatch,
    FolderSpec,
    WriteOptions,
    prepare_documents,
    workers_for,
)
from gridformer.data.side_texts import Question, write_questions
from gridformer.data.tokenfolder import SPLITS, SplitName, TokenFolder
from gridformer.data.tokenizer import Tokenizer
from gridformer.data.tokensplit import LABEL_COLUMN, LABELS, Column
from gridformer.utils.errors import DataError, UserError
from gridformer.utils.files import UnreadableError, read_json, read_text
from gridformer.utils.units import GIB

BAD_ROWS = "incomplete rows"
MISPLACED = "answers that are not at their place"
NO_CONTEXT = "questions without a context"
INCOMPLETE = "incomplete questions"


class Example(NamedTuple):
    """One example: its texts, and the values of its columns beside what its tokens determine."""

    texts: tuple[str, ...]
    label: str | None = None
    values: Mapping[str, object] = MappingProxyType({})
    # The characters [begin, end) of the answer in the context; (-1, -1) if there is none.
    answer: tuple[int, int] | None = None
    split: SplitName | None = None


class GlueTask(NamedTuple):
    """One data set of GLUE, whose training file is train.tsv."""

    columns: tuple[str, ...]  # of the first text, of the second one if there is one, of the label
    labels: tuple[str, ...]  # in the order of their numbers; none if the last column has numbers
    val: str = "dev.tsv"
    header: bool = True  # whether the first row names the columns, which otherwise are numbers


_MNLI = ("sentence1", "sentence2", "gold_label"), ("contradiction", "entailment", "neutral")
_ENTAILS = ("entailment", "not_entailment")
GLUE: dict[str, GlueTask] = {
    "mnli": GlueTask(*_MNLI, "dev_matched.tsv"),
    "mnli-mismatched": GlueTask(*_MNLI, "dev_mismatched.tsv"),
    "qqp": GlueTask(("question1", "question2", "is_duplicate"), ("0", "1")),
    "qnli": GlueTask(("question", "sentence", "label"), _ENTAILS),
    "rte": GlueTask(("sentence1", "sentence2", "label"), _ENTAILS),
    "mrpc": GlueTask(("#1 String", "#2 String", "Quality"), ("0", "1")),
    "sst-2": GlueTask(("sentence", "label"), ("0", "1")),
    "sts-b": GlueTask(("sentence1", "sentence2", "score"), ()),
    "cola": GlueTask(("3", "1"), ("0", "1"), header=False),
}
# The training and validation files of each format; of several names the first that exists is read.
_FILES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    **{kind: (("train.tsv",), (task.val,)) for kind, task in GLUE.items()},
    "squad": (("train-v2.0.json", "train-v1.1.json"), ("dev-v2.0.json", "dev-v1.1.json")),
    "race": (("train",), ("dev",)),
}
FORMATS = tuple(_FILES)


def prepare_task(
    kind: str, path: Path, out: Path, tokenizer: Tokenizer, **options: Unpack[WriteOptions]
) -> TokenFolder:
    """Writes a folder of examples from a data set, whose splits are those of its files."""
    if kind not in FORMATS:
        raise UserError(f"--format {kind} is unknown: use one of {', '.join(FORMATS)}")
    places = []
    for names in _FILES[kind]:
        there = [path / name for name in names if (path / name).exists()]
        if not there:
            raise DataError(
                f"{path}: has no {' or '.join(names)}, which --format {kind} reads: name the "
                "folder that holds the files of the data set"
            )
        places.append(there[0])
    read, columns = _reader(kind, places[0])

    def examples(skipped: Counter[str], cursor: Cursor) -> Iterator[Example]:
        for number in range(cursor.mark or 0, len(SPLITS)):
            cursor.reached(number, skipped)
            for example in read(places[number], skipped):
                yield example._replace(split=SPLITS[number])

    def also(folder: Path) -> None:
        # A preparation that goes on does not read all of its files again, so this does.
        if kind == "squad":
            for split, place in zip(SPLITS, places):
                write_questions(folder, split, (one for one, _ in read_squad(place, Counter())))

    spec: FolderSpec[Example] = FolderSpec(
        "examples",
        lambda used: partial(_encoded, used),
        lambda one: sum(map(len, one.texts)),
        {"format": kind},
        columns,
        also,
    )
    files = [f for place in places for f in ([place] if place.is_file() else _race_files(place))]
    # They do not tell how much text is tokenized: an example may repeat one that a file has once.
    size = sum(file.stat().st_size for file in files)
    options["workers"] = workers_for(options.get("workers", 1), size)
    source = Source(f"{kind}: {path}", examples, files=tuple(files))
    return prepare_documents([source], out, spec, tokenizer, **options)


def _reader(
    kind: str, train: Path
) -> tuple[Callable[[Path, Counter[str]], Iterator[Example]], dict[str, Column]]:
    """Returns what reads a file of a format, and the columns of its examples."""
    read: Callable[[Path, Counter[str]], Iterator[Example]]
    if kind == "squad":
        read, n, more = squad_examples, 2, {"answer": Column(dtype="int32", width=2)}
    elif kind == "race":
        first = next(read_race(train, Counter()), None)
        n = len(first.texts) if first else 5
        read, more = partial(read_race, n_texts=n), {"right": Column(dtype="int32")}
    else:
        read, n, more = partial(read_glue, GLUE[kind]), 2, {"value": Column(dtype="float32")}
        if GLUE[kind].labels:
            more = {LABELS: LABEL_COLUMN}
    return read, {"parts": Column(dtype="int32", width=n), **more}


def _encoded(tokenizer: Tokenizer, examples: Sequence[Example]) -> EncodedBatch:
    """Returns examples as documents. Those that follow one another often share a text."""
    texts = [*dict.fromkeys(text for one in examples for text in one.texts)]
    of_text = dict(zip(texts, tokenizer.encode_with_offsets(texts)))
    documents = []
    for one in examples:
        parts, offsets = zip(*(of_text[text] for text in one.texts))
        values = {"parts": [len(part) for part in parts], **one.values}
        if one.answer is not None:
            values["answer"] = _tokens_of(one.answer, offsets[-1])
        ids = np.array([i for part in parts for i in part], dtype=np.int32)
        n_bytes = sum(len(text.encode("utf-8", "replace")) for text in one.texts)
        documents.append(Document(ids, values, one.label, one.split, n_bytes))
    return documents, Counter()


def _tokens_of(answer: tuple[int, int], offsets: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Returns the first and the last token of an answer in its context; (-1, -1) for none."""
    begin, end = answer
    if begin < 0:
        return -1, -1
    inside = [i for i, (low, high) in enumerate(offsets) if low < end and high > begin]
    return (inside[0], inside[-1]) if inside else (-1, -1)


def read_glue(task: GlueTask, path: Path, skipped: Counter[str]) -> Iterator[Example]:
    """Yields the examples of a file of GLUE."""
    text = _read(read_text, path, GIB).removeprefix("\ufeff")
    lines = text.split("\n")  # splitlines would also split at other separators of Unicode
    rows = [line.rstrip("\r").split("\t") for line in lines if line.strip()]
    names = [*"0123"]
    if task.header:
        names, rows = rows[0] if rows else [], rows[1:]
    if missing := [column for column in task.columns if column not in names]:
        raise DataError(
            f"{path}: has no column {', '.join(missing)}, but {', '.join(names) or 'nothing'}: it "
            "is not a file of this data set"
        )
    places, n = [names.index(column) for column in task.columns], 0
    for row in rows:
        *texts, label = (row[place].strip() if place < len(row) else "" for place in places)
        if not all(texts) or not _known(label, task):
            skipped[BAD_ROWS] += 1
            continue
        n += 1
        pair = texts[0], texts[1] if len(texts) > 1 else ""
        yield Example(pair, label) if task.labels else Example(pair, values={"value": float(label)})
    if not n:
        wanted = f"one of the labels {', '.join(task.labels)}" if task.labels else "a number"
        raise DataError(
            f"{path}: no row has texts and {wanted}: it is not a file of this data set with "
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


def squad_examples(path: Path, skipped: Counter[str]) -> Iterator[Example]:
    """Yields the questions of a file of SQuAD as examples."""
    for question, start in read_squad(path, skipped):
        end = start + len(question.answers[0].rstrip()) if question.answers else -1
        yield Example((question.question, question.context), answer=(start, end))


def read_squad(path: Path, skipped: Counter[str]) -> Iterator[tuple[Question, int]]:
    """Yields the questions of a file of SQuAD, and the character of the answer, or -1."""
    raw = _read(read_json, path, GIB)
    try:
        for article in raw["data"]:
            for paragraph in article["paragraphs"]:
                for asked in paragraph["qas"]:
                    question = _asked(paragraph["context"], asked, skipped)
                    if question is not None:
                        yield question
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: is not a file of SQuAD 1.1 or 2.0 ({type(error).__name__}: {error}); it has "
            "data, a list of articles with paragraphs, each with a context and qas"
        ) from None


def _asked(
    context: str, asked: dict[str, Any], skipped: Counter[str]
) -> tuple[Question, int] | None:
    if not context.strip() or not asked["question"].strip():
        skipped[NO_CONTEXT] += 1
        return None
    answers = [] if asked.get("is_impossible", False) else asked["answers"]
    texts = tuple(one["text"] for one in answers)
    question = Question(str(asked["id"]), context, asked["question"].strip(), texts)
    if not answers:
        return question, -1
    text, start = texts[0], int(answers[0]["answer_start"])
    if not text.strip() or context[start : start + len(text)] != text:
        skipped[MISPLACED] += 1
        return None
    return question, start


def _race_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.txt"))


def read_race(folder: Path, skipped: Counter[str], n_texts: int | None = None) -> Iterator[Example]:
    """Yields the questions of all texts of a folder of RACE, ordered by the names of files.

    The texts of an example, `n_texts` if given, are a passage, and the question with each of its
    answers in its blank, or behind it.
    """
    files = _race_files(folder)
    if not files:
        raise DataError(f"{folder}: has no .txt files of RACE; name a folder such as RACE/train")
    for file in files:
        raw = _read(read_json, file)
        try:
            passage = raw["article"].strip()
            asked = list(zip(raw["questions"], raw["options"], raw["answers"], strict=True))
            for question, options, answer in asked:
                right = string.ascii_uppercase.find(answer.strip())
                question, options = question.strip(), [option.strip() for option in options]
                if not passage or not all(options) or right not in range(len(options)):
                    skipped[INCOMPLETE] += 1
                elif n_texts and len(options) != n_texts - 1:
                    skipped[f"questions with another number of answers than {n_texts - 1}"] += 1
                else:
                    whole = question if "_" in question else f"{question} _"
                    filled = (whole.replace("_", option, 1).strip() for option in options)
                    yield Example((passage, *filled), values={"right": right})
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DataError(
                f"{file}: is not a text of RACE ({type(error).__name__}: {error}); it has article, "
                "questions, options and answers"
            ) from None


def _read(read: Callable[..., Any], path: Path, *at_most: int) -> Any:
    try:
        return read(path, *at_most)
    except UnreadableError as error:
        raise DataError(str(error)) from None
