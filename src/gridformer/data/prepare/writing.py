"""Writes a token folder batch by batch, so that it can go on where it was stopped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from gridformer.data.prepare.progress import PrepareProgress
from gridformer.data.prepare.reading import Position, Reader, batches
from gridformer.data.prepare.resuming import PreparationState, Unfinished
from gridformer.data.prepare.splitting import SplitWriter
from gridformer.data.prepare.tokenizing import Encoder, encoded_batches
from gridformer.data.prepare.utf8 import is_damage
from gridformer.data.tokenfolder import (
    INDEX,
    TOKENIZER,
    Index,
    SourceEntry,
    TokenFolder,
    TokenizerEntry,
)
from gridformer.data.tokenizer import Tokenizer

Item = TypeVar("Item")
Made = TypeVar("Made")
GivenItem = TypeVar("GivenItem", contravariant=True)
GivenMade = TypeVar("GivenMade", contravariant=True)


class Appender(Protocol[GivenItem, GivenMade]):
    """Appends the documents made from a batch to a `SplitWriter`."""

    @property
    def dropped(self) -> Counter[str]:
        """What was left out after it was tokenized."""

    @property
    def is_between(self) -> bool:
        """Whether the last batch ended with the end of a document."""

    def append(self, source: int, items: Sequence[GivenItem], made: GivenMade) -> int:
        """Appends a batch of a source, and returns the bytes of its text.

        Args:
            source: The number of the source.
            items: The items of the batch.
            made: The encoding of these items.
        """


@dataclass(frozen=True)
class Input(Generic[Item, Made]):
    """What is read, and how it is encoded.

    Attributes:
        readers: What reads each source.
        chars: Returns the characters of an item.
        encoder: Turns items into tokens.
        workers: How many processes do that.
        total: The bytes of all sources, or None if they are not known.
    """

    readers: Sequence[Reader[Item]]
    chars: Callable[[Item], int]
    encoder: Encoder[Item, Made]
    workers: int
    total: int | None = None


@dataclass(frozen=True)
class Written:
    """What was written: the documents and bytes of each source, and what is left out or damaged."""

    documents: list[int]
    n_bytes: list[int]
    skipped: dict[str, int]

    @property
    def left_out(self) -> str:
        """What was left out, in parentheses, for an error; empty if nothing was."""
        told = ", ".join(
            f"{count} {what}" for what, count in self.skipped.items() if not is_damage(what)
        )
        return f" (left out: {told})" if told else ""


def write_batches(
    work: Unfinished,
    key: str,
    origin: str,
    writer: SplitWriter,
    appender: Appender[Item, Made],
    given: Input[Item, Made],
    on_progress: Callable[[PrepareProgress], None],
) -> Written:
    """Writes all documents after those that are written already, and saves its progress.

    Args:
        work: The folder. If it has a state, writer and appender have begun with that.
        key: What is prepared and how; see `resume_key`.
        origin: Where the tokenizer comes from.
        writer: Writes the files.
        appender: Appends to it.
        given: What is read.
        on_progress: Called after each batch.
    """
    state = work.state
    kept = writer.documents
    none = [0] * len(given.readers)
    documents = list(state.documents) if state else [*none]
    n_bytes = list(state.n_bytes) if state else [*none]
    skipped: Counter[str] = Counter()
    read = batches(given.readers, given.chars, skipped, state.position if state else Position())
    for batch, made in encoded_batches(read, given.encoder, given.workers):
        before = writer.documents
        n_bytes[batch.source] += appender.append(batch.source, batch.items, made)
        documents[batch.source] += writer.documents - before
        on_progress(
            PrepareProgress(
                "tokenizing", sum(n_bytes), writer.tokens, writer.documents, given.total, kept
            )
        )
        if work.is_due and appender.is_between:
            work.save(
                PreparationState(
                    key=key,
                    origin=origin,
                    position=batch.after,
                    documents=tuple(documents),
                    n_bytes=tuple(n_bytes),
                    dropped=dict(appender.dropped),
                    writer=writer.state(),
                )
            )
    return Written(documents, n_bytes, dict(sorted((skipped + appender.dropped).items())))


def saved_tokenizer(work: Unfinished, tokenizer: Tokenizer | Callable[[], Tokenizer]) -> Tokenizer:
    """Returns a given tokenizer, that of a preparation that was stopped, or one that is trained.

    It is saved, so that a preparation that goes on has it.

    Args:
        work: The folder.
        tokenizer: The tokenizer, or a function that trains it.
    """
    if isinstance(tokenizer, Tokenizer):
        found = tokenizer
    elif work.state is not None:
        found = Tokenizer.load(work.folder / TOKENIZER)
        found.origin = work.state.origin
    else:
        found = tokenizer()
    found.save(work.folder / TOKENIZER)
    return found


@dataclass(frozen=True)
class Described:
    """What index.json says beside what the files show; see `Index`."""

    seed: int
    val_fraction: float
    sources: tuple[SourceEntry, ...]
    skipped: dict[str, int]
    languages: tuple[str, str] | None = None
    ends: bool = True


def finish(
    work: Unfinished, writer: SplitWriter, tokenizer: Tokenizer, described: Described
) -> None:
    """Closes the files of a folder, and writes its index; at least one document was appended.

    Args:
        work: The folder.
        writer: Has written the documents.
        tokenizer: The tokenizer, which is in the folder already.
        described: What the index says beside what the files show.
    """
    if writer.rewrites:
        work.forget()
    splits = writer.finish()
    labels = writer.finish_labels()
    index = Index(
        kind=writer.kind,
        languages=described.languages,
        labels=labels,
        columns=writer.columns,
        dtype="uint16" if writer.dtype.itemsize == 2 else "int32",
        vocab_size=tokenizer.vocab_size,
        eos_token=tokenizer.eos_token,
        eos_id=tokenizer.eos_id,
        bos_token=tokenizer.bos_token,
        ends=described.ends,
        seed=described.seed,
        val_fraction=described.val_fraction,
        train=splits["train"],
        val=splits["val"],
        tokenizer=TokenizerEntry(
            origin=tokenizer.origin, bytes=(work.folder / TOKENIZER).stat().st_size
        ),
        sources=described.sources,
        skipped=described.skipped,
    )
    # The index is written last, because a folder does not open without it.
    text = index.model_dump_json(indent=2) + "\n"
    (work.folder / INDEX).write_text(text, encoding="utf-8")
    TokenFolder.open(work.folder)


def sampled(
    texts: Callable[[], Iterator[str]],
    vocab_size: int,
    on_progress: Callable[[PrepareProgress], None],
    empty: Callable[[], Exception],
) -> Tokenizer:
    """Trains a tokenizer on a sample.

    Args:
        texts: Yields the sample.
        vocab_size: The most tokens.
        on_progress: Called with the progress.
        empty: Returns what to raise if there is no text.

    Raises:
        Exception: What `empty` returns, because there is no text.
    """
    on_progress(PrepareProgress("sampling"))
    found = list(texts())
    if not found:
        raise empty()
    on_progress(PrepareProgress("training the tokenizer"))
    return Tokenizer.train(found, vocab_size)
