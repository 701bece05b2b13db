"""Writes folders of examples from the files of GLUE, SQuAD and RACE."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from gridformer.data.prepare.documents import (
    Document,
    DocumentSource,
    EncodedBatch,
    FolderSpec,
    OnProgress,
    prepare_documents,
)
from gridformer.data.prepare.reading import Cursor
from gridformer.data.prepare.task_readers import (
    GLUE,
    Example,
    read_glue,
    read_race,
    read_squad,
    squad_examples,
)
from gridformer.data.prepare.tokenizing import workers_for
from gridformer.data.side_texts import write_questions
from gridformer.data.tokenfolder import SPLITS, SplitName, TokenFolder
from gridformer.data.tokenizer import Tokenizer
from gridformer.data.tokensplit import LABEL_COLUMN, LABELS, Column
from gridformer.utils.errors import DataError, UserError

# The files of each format; the first that exists is read.
_FILES: dict[str, dict[SplitName, tuple[str, ...]]] = {
    **{kind: {"train": (task.train,), "val": (task.val,)} for kind, task in GLUE.items()},
    "squad": {
        "train": ("train-v2.0.json", "train-v1.1.json"),
        "val": ("dev-v2.0.json", "dev-v1.1.json"),
    },
    "race": {"train": ("train",), "val": ("dev",)},
}
FORMATS = tuple(_FILES)


def prepare_task(
    kind: str,
    path: Path,
    out: Path,
    tokenizer: Tokenizer,
    *,
    workers: int | None = 1,
    overwrite: bool = False,
    on_progress: OnProgress = lambda progress: None,
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
    if kind not in FORMATS:
        raise UserError(f"--format {kind} is unknown: use one of {', '.join(FORMATS)}")
    places = [_first_existing(kind, path, split) for split in SPLITS]
    read, columns = _reader(kind, places[0])

    def examples(skipped: Counter[str], cursor: Cursor) -> Iterator[Example]:
        for number in range(cursor.mark or 0, len(SPLITS)):
            cursor.reached(number, skipped)
            for example in read(places[number], skipped):
                yield replace(example, split=SPLITS[number])

    def also(folder: Path) -> None:
        # A preparation that goes on does not read all of its files again, so this does.
        if kind == "squad":
            for split, place in zip(SPLITS, places):
                write_questions(folder, split, (one for one, _ in read_squad(place, Counter())))

    spec: FolderSpec[Example] = FolderSpec(
        "examples",
        lambda used: partial(_example_encoder, used),
        lambda one: sum(map(len, one.texts)),
        {"format": kind},
        columns,
        also,
    )
    files = [file for place in places for file in _files_of(place)]
    # They do not tell how much text is tokenized: an example may repeat one that a file has once.
    size = sum(file.stat().st_size for file in files)
    return prepare_documents(
        [DocumentSource(f"{kind}: {path}", examples, tuple(files))],
        out,
        spec,
        tokenizer,
        workers=workers_for(workers, size),
        overwrite=overwrite,
        on_progress=on_progress,
    )


def _reader(
    kind: str, train: Path
) -> tuple[Callable[[Path, Counter[str]], Iterator[Example]], dict[str, Column]]:
    """Returns what reads a file of a format, and the columns of its examples."""
    if kind == "squad":
        return squad_examples, _columns(2, answer=Column(dtype="int32", width=2))
    if kind == "race":
        first = next(read_race(train, Counter()), None)
        n = len(first.texts) if first else 5
        return partial(_of_length, n), _columns(n, right=Column(dtype="int32"))
    task = GLUE[kind]
    value = {LABELS: LABEL_COLUMN} if task.labels else {"value": Column(dtype="float32")}
    return partial(read_glue, task), _columns(2, **value)


def _columns(parts: int, **more: Column) -> dict[str, Column]:
    return {"parts": Column(dtype="int32", width=parts), **more}


def _of_length(n: int, place: Path, skipped: Counter[str]) -> Iterator[Example]:
    for one in read_race(place, skipped):
        if len(one.texts) == n:
            yield one
        else:
            skipped[f"questions with another number of answers than {n - 1}"] += 1


def _first_existing(kind: str, path: Path, split: SplitName) -> Path:
    names = _FILES[kind][split]
    for name in names:
        if (path / name).exists():
            return path / name
    raise DataError(
        f"{path}: has no {' or '.join(names)}, which --format {kind} reads: name the folder that "
        "holds the files of the data set"
    )


def _files_of(path: Path) -> tuple[Path, ...]:
    return tuple(sorted(path.rglob("*.txt"))) if path.is_dir() else (path,)


@contextlib.contextmanager
def _example_encoder(tokenizer: Tokenizer) -> Iterator[Callable[[Sequence[Example]], EncodedBatch]]:
    """Turns examples into documents; see Encoder."""

    def encode(examples: Sequence[Example]) -> EncodedBatch:
        # Examples that follow one another often share a text.
        once = [*dict.fromkeys(text for one in examples for text in one.texts)]
        encoded: Sequence[tuple[list[int], list[tuple[int, int]]]]
        if examples[0].answer is None:
            encoded = [(ids, []) for ids in tokenizer.encode_batch(once)]
        else:
            encoded = tokenizer.encode_with_offsets(once)
        found = dict(zip(once, encoded))
        made = []
        for one in examples:
            parts, offsets = zip(*(found[text] for text in one.texts))
            values = {"parts": [len(part) for part in parts], **one.values}
            if one.answer is not None:
                values["answer"] = _tokens_of(one.answer, offsets[-1])
            tokens = np.array([i for part in parts for i in part], dtype=np.int32)
            n_bytes = sum(len(text.encode("utf-8", "replace")) for text in one.texts)
            made.append(Document(tokens, values, one.label, one.split, n_bytes))
        return made, Counter()

    yield encode


def _tokens_of(answer: tuple[int, int], offsets: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Returns the first and the last token of an answer in its context; (-1, -1) for none."""
    begin, end = answer
    if begin < 0:
        return -1, -1
    inside = [i for i, (low, high) in enumerate(offsets) if low < end and high > begin]
    return (inside[0], inside[-1]) if inside else (-1, -1)
