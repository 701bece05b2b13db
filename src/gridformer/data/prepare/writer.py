"""The writer of token folders: tokenizes the documents of sources of any kind, and writes them.

It needs one pass and bounded memory. The tokenizers library has threads of its own, but its results
become Python's lists under one lock; worker processes make these lists at the same time.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypedDict, cast

from gridformer.data.prepare.atomic_folder import PreparationState, Unfinished, atomic_folder
from gridformer.data.prepare.reading import (
    Cursor,
    Item,
    Source,
    batches,
    is_damage,
)
from gridformer.data.prepare.split_file import Document, SplitWriter
from gridformer.data.tokenfolder import (
    INDEX,
    TOKENIZER,
    VERSION,
    Index,
    Kind,
    SourceEntry,
    TokenFolder,
    TokenizerEntry,
    token_dtype,
)
from gridformer.data.tokenizer import Tokenizer
from gridformer.data.tokensplit import Column
from gridformer.utils.errors import DataError, UserError
from gridformer.utils.process import end_with_parent, n_cores

WORTH_WORKERS = 64_000_000  # bytes of text below which starting processes takes longer
_WAITING = 2  # batches of each worker that are read before they are needed


@dataclass(frozen=True)
class PrepareProgress:
    """The progress of a preparation: what is tokenized and written."""

    phase: Literal["sampling", "training the tokenizer", "tokenizing"]
    bytes: int = 0
    tokens: int = 0
    documents: int = 0
    total: int | None = None  # bytes of all sources, if they are known
    kept: int = 0  # documents that a preparation that was stopped had written


OnProgress = Callable[[PrepareProgress], None]


class WriteOptions(TypedDict, total=False):
    """How a token folder is written."""

    workers: int | None  # processes that tokenize; None means one a core if there is much text
    overwrite: bool
    on_progress: OnProgress


# The documents of a batch, and what was left out of it, by reason.
EncodedBatch = tuple[list[Document], Counter[str]]
# Turns the items of a batch into documents, which depend on these alone. It is pickled into each
# worker process.
Encoder = Callable[[Sequence[Item]], EncodedBatch]


@dataclass(frozen=True)
class FolderSpec(Generic[Item]):
    """What kind of folder is made from the items of the sources, and how."""

    kind: Kind
    encoder: Callable[[Tokenizer], Encoder[Item]]
    chars: Callable[[Item], int]  # the characters of an item
    settings: Mapping[str, object] = field(default_factory=dict)  # that determine the documents
    columns: Mapping[str, Column] = field(default_factory=dict)
    also: Callable[[Path], None] = lambda folder: None  # writes what else belongs into the folder
    # Documents that do not name their split go to validation by this seed and fraction.
    seed: int = 1234
    val_fraction: float = 0.02
    languages: tuple[str, str] | None = None
    begins: bool = False  # with the tokenizer's begin-of-text token, if it has one
    ends: bool = True  # with the end-of-text token
    nothing: str = "there is nothing to prepare"  # the error if there are no documents


def prepare_documents(
    sources: Sequence[Source[Item]],
    out: Path | str,
    spec: FolderSpec[Item],
    tokenizer: Tokenizer | Callable[[], Tokenizer],
    *,
    workers: int | None = 1,
    overwrite: bool = False,
    on_progress: OnProgress = lambda progress: None,
    resumable: bool = True,
) -> TokenFolder:
    """Writes the documents of all sources, in order, to a token folder, and opens it.

    The folder's bytes do not depend on the number of workers. After a preparation was stopped, the
    same call goes on where it was, unless it is not resumable.

    Args:
        tokenizer: The tokenizer, or a function that trains it; a call that goes on does not train
            it again.
    """
    if not 0 < spec.val_fraction < 1:
        raise UserError(
            f"val_fraction={spec.val_fraction} must be between 0 and 1, for instance 0.02"
        )
    if workers is not None and workers < 1:
        raise UserError(f"workers={workers} must be 1 or more")
    given = tokenizer if isinstance(tokenizer, Tokenizer) else None
    settings = {
        "version": VERSION,
        "tokenizer": (given.to_json(), given.eos_token, given.bos_token) if given else None,
        "spec": (spec.kind, spec.languages, spec.seed, spec.val_fraction, spec.ends, spec.settings),
    }
    described = [(source.name, source.n_bytes, source.revision) for source in sources]
    stats = [(str(path), path.stat()) for one in sources for path in one.files]
    files = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    text = json.dumps([described, files, settings], default=str)
    key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    with atomic_folder(Path(out), overwrite, key if resumable else None) as work:
        before = work.state
        if isinstance(tokenizer, Tokenizer):
            used = tokenizer
        elif before:
            used = Tokenizer.load(work.folder / TOKENIZER)
            used.origin = before.origin
        else:
            used = tokenizer()
        used.save(work.folder / TOKENIZER)  # also for a preparation that goes on
        none = [0] * len(sources)
        state = before or PreparationState(key, used.origin, none, [*none])
        dtype = token_dtype(used.vocab_size)
        with SplitWriter(
            work.folder,
            dtype,
            used.eos_id if spec.ends else None,
            spec.seed,
            spec.val_fraction,
            spec.kind,
            spec.columns,
            used.bos_id if spec.begins else None,
            state.writer,
        ) as writer:
            skipped = _append_all(sources, spec, used, work, state, writer, workers, on_progress)
            names = [one.name for one in sources]
            if not writer.documents:
                raise nothing_error(names, spec.nothing, skipped)
            if writer.splits_given and (missing := writer.empty_splits):
                raise nothing_error(names, f"there are no documents for the split {missing[0]}", {})
            spec.also(work.folder)
            if writer.rewrites:
                work.forget()
            splits, labels = writer.finish()
        index = Index(
            kind=spec.kind,
            languages=spec.languages,
            labels=labels,
            columns=writer.columns,
            dtype=cast(Any, dtype.name),
            vocab_size=used.vocab_size,
            eos_token=used.eos_token,
            eos_id=used.eos_id,
            bos_token=used.bos_token,
            ends=spec.ends,
            seed=spec.seed,
            val_fraction=spec.val_fraction,
            train=splits["train"],
            val=splits["val"],
            tokenizer=TokenizerEntry(
                origin=used.origin, bytes=(work.folder / TOKENIZER).stat().st_size
            ),
            sources=tuple(
                SourceEntry(source=s.name, license=s.license, documents=n, bytes=b, parts=s.parts)
                for s, n, b in zip(sources, state.documents, state.n_bytes)
            ),
            skipped=skipped,
        )
        text = index.model_dump_json(indent=2) + "\n"
        (work.folder / INDEX).write_text(text, encoding="utf-8")
        TokenFolder.open(work.folder)
    return TokenFolder.open(out)


def nothing_error(names: Iterable[str], nothing: str, skipped: Mapping[str, int]) -> DataError:
    """Returns the error for sources without documents, which says what was left out of them."""
    told = ", ".join(f"{n} {what}" for what, n in skipped.items() if not is_damage(what))
    left_out = f" (left out: {told})" if told else ""
    return DataError(f"{', '.join(names)}: {nothing}{left_out}")


def _append_all(
    sources: Sequence[Source[Item]],
    spec: FolderSpec[Item],
    tokenizer: Tokenizer,
    work: Unfinished,
    state: PreparationState,
    writer: SplitWriter,
    workers: int | None,
    on_progress: OnProgress,
) -> dict[str, int]:
    """Appends all documents after `state`, which it saves; returns what was left out or damaged."""
    kept, skipped = writer.documents, Counter[str]()
    sizes = [one.n_bytes for one in sources if one.n_bytes is not None]
    total = sum(sizes) if len(sizes) == len(sources) else None
    read = batches([one.read for one in sources], spec.chars, skipped, state.cursor)
    encoder = spec.encoder(tokenizer)
    for cursor, (made, dropped) in encoded_batches(read, encoder, workers_for(workers, total)):
        before, state.cursor = writer.documents, cursor
        for document in made:
            writer.append(document)
            state.n_bytes[cursor.source] += document.n_bytes
        state.dropped.update(dropped)
        state.documents[cursor.source] += writer.documents - before
        n_bytes = sum(state.n_bytes)
        on_progress(
            PrepareProgress("tokenizing", n_bytes, writer.tokens, writer.documents, total, kept)
        )
        if work.is_due and writer.is_between:
            state.writer = writer.state()
            work.save(state)
    return dict(sorted((skipped + state.dropped).items()))


def workers_for(wanted: int | None, n_bytes: int | None) -> int:
    """Returns how many processes tokenize; by default one for each core, or one for little text."""
    if wanted is not None:
        return wanted
    if n_bytes is not None and n_bytes < WORTH_WORKERS:
        return 1
    return n_cores()


def encoded_batches(
    batches: Iterator[tuple[list[Item], Cursor]], encoder: Encoder[Item], workers: int
) -> Iterator[tuple[Cursor, EncodedBatch]]:
    """Yields the encoding of every batch, in order. One worker is this process itself."""
    if workers <= 1:
        for items, after in batches:
            yield after, encoder(items)
        return
    pool = ProcessPoolExecutor(
        workers,
        # A forked process would have the library's threads only in part.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(encoder,),
    )
    waiting: deque[tuple[Cursor, Future[EncodedBatch]]] = deque()
    try:
        for items, after in batches:
            waiting.append((after, pool.submit(_work, items)))
            if len(waiting) >= _WAITING * workers:
                first, future = waiting.popleft()
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()
    except BrokenProcessPool:
        raise DataError(
            "a worker process of prepare died, probably for lack of memory: use fewer --workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


# The encoder of a worker process, which ends with the process.
_own: Encoder[Any] | None = None


def _begin(encoder: Encoder[Any]) -> None:
    global _own
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores already
    end_with_parent()
    _own = encoder


def _work(items: Sequence[Any]) -> EncodedBatch:
    assert _own is not None
    return _own(items)
