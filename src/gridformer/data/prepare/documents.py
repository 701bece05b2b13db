"""Writes a token folder from documents that come with values of columns."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Generic, TypeVar

from numpy.typing import NDArray

from gridformer.data.columns import Column
from gridformer.data.prepare.place import ReadingPlace
from gridformer.data.prepare.progress import PrepareProgress
from gridformer.data.prepare.reading import Reader
from gridformer.data.prepare.replacing import written_whole
from gridformer.data.prepare.resuming import Unfinished, resumable, resume_key
from gridformer.data.prepare.splitting import SplitWriter
from gridformer.data.prepare.tokenizing import Encoder, workers_for
from gridformer.data.prepare.writing import (
    Described,
    Input,
    Written,
    finish,
    saved_tokenizer,
    write_batches,
)
from gridformer.data.tokenfolder import (
    VERSION,
    Kind,
    SourceEntry,
    SplitName,
    TokenFolder,
    token_dtype,
)
from gridformer.data.tokenizer import Tokenizer
from gridformer.utils.errors import DataError

Item = TypeVar("Item")


@dataclass(frozen=True)
class Document:
    """One document.

    Attributes:
        ids: Its tokens, without the end-of-text token, which is added.
        values: The values of columns by name: those of the document, and for columns of tokens one
            for each of `ids`, or one more that belongs to the end-of-text token (otherwise 0).
        label: The name of its label, if it has one.
        split: Its split. None lets a hash decide; all documents of a folder have one or none has.
        n_bytes: The bytes of its text as UTF-8, for the summary.
    """

    ids: Sequence[int] | NDArray[Any]
    values: Mapping[str, object] = field(default_factory=dict)
    label: str | None = None
    split: SplitName | None = None
    n_bytes: int = 0


@dataclass(frozen=True)
class EncodedDocuments:
    """The documents of a batch, and what was left out of it."""

    documents: list[Document]
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class SourcePart(Generic[Item]):
    """What is read from one source, or from a part of it.

    Attributes:
        name: The source, for index.json. Parts of the same name that follow each other are one.
        read: Yields its items.
        split: The split of its documents. None lets a hash decide; all parts of a folder name one
            or none does.
        files: The files that are read: others, or changed ones, cannot go on with what was written.
        license: Its license, if known.
        revision: What changes with its items beside the files; see
            `gridformer.data.prepare.hf.TableSource`.
        sized: Whether the sizes of the files tell how much is read. Those of a data set do not:
            they hold other columns, and perhaps other splits.
    """

    name: str
    read: Reader[Item]
    split: SplitName | None = None
    files: tuple[Path, ...] = ()
    license: str | None = None
    revision: str | None = None
    sized: bool = True

    @property
    def n_bytes(self) -> int | None:
        """The bytes of its files, or None if they are compressed or do not tell."""
        if not (self.files and self.sized) or any(path.suffix == ".gz" for path in self.files):
            return None
        return sum(path.stat().st_size for path in self.files)


@dataclass(frozen=True)
class Making(Generic[Item]):
    """What kind of folder is made from the items of the sources, and how.

    Attributes:
        kind: The kind of the folder.
        encoder: Returns what turns items into documents, given a tokenizer; it is pickled.
        chars: Returns the characters of an item.
        settings: What else determines the documents; see `resume_key`.
        columns: The columns. Folders whose documents have labels need the column
            `gridformer.data.columns.LABELS` too, unless their kind is labeled.
        also: Writes what else belongs into the folder.
        seed: The seed that decides which documents are for validation, if parts do not say.
        val_fraction: The fraction of the documents for validation, if parts do not say.
        nothing: What the error says if there are no documents.
    """

    kind: Kind
    encoder: Callable[[Tokenizer], Encoder[Item, EncodedDocuments]]
    chars: Callable[[Item], int]
    settings: Mapping[str, object] = field(default_factory=dict)
    columns: Mapping[str, Column] = field(default_factory=dict)
    also: Callable[[Path], None] = lambda folder: None
    seed: int = 1234
    val_fraction: float = 0.02
    nothing: str = "there is nothing to prepare"


def write_documents(
    documents: Iterable[Document],
    out: Path | str,
    *,
    tokenizer: Tokenizer,
    kind: Kind,
    name: str,
    license: str | None = None,
    columns: Mapping[str, Column] | None = None,
    skipped: Mapping[str, int] | None = None,
    seed: int = 1234,
    val_fraction: float = 0.02,
    overwrite: bool = False,
) -> TokenFolder:
    """Writes documents that are tokenized already to a token folder, in order, and opens it.

    Args:
        documents: The documents. They may be read lazily; memory holds a few thousand at a time.
        out: The folder.
        tokenizer: The tokenizer of the documents' tokens.
        kind: The kind of the folder.
        name: What the documents were read from, for index.json.
        license: Its license, if known.
        columns: The columns. Folders whose documents have labels need the column
            `gridformer.data.columns.LABELS` too, unless their kind is labeled.
        skipped: Counts what was left out. It is read after the last document.
        seed: The seed that decides which documents are for validation, if they do not say.
        val_fraction: The fraction of the documents for validation, if they do not say.
        overwrite: Whether to replace a token folder at `out`.

    Raises:
        UserError: `out` cannot be used.
        DataError: There are no documents, or none of one of the splits that they name; or values
            do not fit their columns.
    """
    out = Path(out)

    def read(counts: Counter[str], place: ReadingPlace) -> Iterator[Document]:
        yield from documents
        counts.update(skipped or {})

    making: Making[Document] = Making(
        kind,
        lambda tokenizer: _Made(),
        lambda document: len(document.ids),
        columns=columns or {},
        seed=seed,
        val_fraction=val_fraction,
    )
    with written_whole(out, overwrite) as folder:
        work = Unfinished(folder, None, can_keep=False)
        saved_tokenizer(work, tokenizer)
        part = SourcePart(name, read, license=license)
        _write([part], work, "", making, tokenizer, 1, lambda progress: None)
    return TokenFolder.open(out)


def prepare_documents(
    parts: Sequence[SourcePart[Item]],
    out: Path | str,
    making: Making[Item],
    tokenizer: Tokenizer | Callable[[], Tokenizer],
    *,
    workers: int | None = 1,
    overwrite: bool = False,
    on_progress: Callable[[PrepareProgress], None] = lambda progress: None,
) -> TokenFolder:
    """Writes the documents of all parts, in order, to a token folder, and opens it.

    The folder's bytes do not depend on the number of workers. After a preparation was stopped, the
    same call goes on where it was.

    Args:
        parts: What is read.
        out: The folder.
        making: What kind of folder is made from the parts, and how.
        tokenizer: The tokenizer, or a function that trains it; a call that goes on does not train
            it again.
        workers: How many processes tokenize; None means one for each core if there is much text.
        overwrite: Whether to replace a token folder at `out`.
        on_progress: Called with the progress.

    Raises:
        UserError: `out` cannot be used.
        DataError: There are no documents, or none of one of the splits that parts name; or values
            do not fit their columns.
    """
    out = Path(out)
    given = tokenizer if isinstance(tokenizer, Tokenizer) else None
    spelled = (given.to_json(), given.eos_token, given.bos_token) if given else None
    fixed = (making.kind, making.seed, making.val_fraction, making.settings)
    described = [(part.name, part.split, part.revision) for part in parts]
    files = [path for part in parts for path in part.files]
    key = resume_key(described, files, {"version": VERSION, "tokenizer": spelled, "fixed": fixed})
    with resumable(out, overwrite, key) as work:
        used = saved_tokenizer(work, tokenizer)
        _write(parts, work, key, making, used, workers, on_progress)
    return TokenFolder.open(out)


def _write(
    parts: Sequence[SourcePart[Item]],
    work: Unfinished,
    key: str,
    making: Making[Item],
    tokenizer: Tokenizer,
    workers: int | None,
    on_progress: Callable[[PrepareProgress], None],
) -> None:
    sizes = [part.n_bytes for part in parts]
    total = None if None in sizes else sum(size or 0 for size in sizes)
    read = Input(
        [part.read for part in parts],
        making.chars,
        making.encoder(tokenizer),
        workers_for(workers, total),
        # An example may repeat a text that its file has once.
        total if parts[0].split is None else None,
    )
    state = work.state
    with SplitWriter(
        work.folder,
        token_dtype(tokenizer.vocab_size),
        tokenizer.eos_id,
        making.seed,
        making.val_fraction,
        making.kind,
        making.columns,
        state=state.writer if state else None,
    ) as writer:
        appender = _Appender(writer, parts, Counter(state.dropped if state else {}))
        done = write_batches(work, key, tokenizer.origin, writer, appender, read, on_progress)
        names = ", ".join(dict.fromkeys(part.name for part in parts))
        if not writer.documents:
            raise DataError(f"{names}: {making.nothing}{done.left_out}")
        if appender.splits_given and writer.empty_splits:
            missing = writer.empty_splits[0]
            raise DataError(f"{names}: there are no documents for the split {missing}")
        making.also(work.folder)
        entries = _entries(parts, done)
        described = Described(making.seed, making.val_fraction, entries, done.skipped)
        finish(work, writer, tokenizer, described)


@dataclass(frozen=True)
class _Made:
    """The encoder of documents that are tokenized already."""

    @contextlib.contextmanager
    def begin(self) -> Iterator[Callable[[Sequence[Document]], EncodedDocuments]]:
        """See Encoder."""
        yield lambda items: EncodedDocuments([*items])


class _Appender:
    """Appends documents to a writer.

    Attributes:
        dropped: What was left out after it was tokenized.
        is_between: Always true, because all documents of a batch are whole.
        splits_given: Whether the documents say which split they belong to.
    """

    def __init__(
        self, writer: SplitWriter, parts: Sequence[SourcePart[Any]], dropped: Counter[str]
    ) -> None:
        self._writer, self._parts = writer, parts
        self.dropped = dropped
        self.is_between = True
        self.splits_given = parts[0].split is not None

    def append(self, source: int, items: Sequence[object], made: EncodedDocuments) -> int:
        """See Appender."""
        for one in made.documents:
            split = one.split or self._parts[source].split
            self.splits_given = split is not None
            self._writer.append(one.ids, True, one.label, one.values, split)
        self.dropped.update(made.dropped)
        return sum(one.n_bytes for one in made.documents)


def _entries(parts: Sequence[SourcePart[Any]], done: Written) -> tuple[SourceEntry, ...]:
    entries = []
    for name, some in groupby(range(len(parts)), lambda i: parts[i].name):
        numbers = [*some]
        entries.append(
            SourceEntry(
                source=name,
                license=parts[numbers[0]].license,
                documents=sum(done.documents[i] for i in numbers),
                bytes=sum(done.n_bytes[i] for i in numbers),
            )
        )
    return tuple(entries)
