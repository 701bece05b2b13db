"""Turns a corpus into a token folder in one pass and in bounded memory."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from numpy.typing import NDArray

from gridformer.data.prepare.reading import Position, batches
from gridformer.data.prepare.records import NO_PAIR
from gridformer.data.prepare.replacing import check_free
from gridformer.data.prepare.resuming import State, Unfinished, key_of, resumable
from gridformer.data.prepare.sources import Source
from gridformer.data.prepare.splitting import SplitWriter
from gridformer.data.prepare.tokenizing import tokenized, workers_for
from gridformer.data.tokenfolder import (
    INDEX,
    TOKENIZER,
    VERSION,
    Index,
    SourceEntry,
    TokenFolder,
    TokenizerEntry,
    token_dtype,
)
from gridformer.data.tokenizer import Tokenizer, encodable
from gridformer.utils.errors import DataError, UserError


@dataclass(frozen=True)
class Progress:
    """The progress of a preparation.

    Attributes:
        phase: What it does now.
        bytes: The bytes of text that are tokenized.
        tokens: The tokens that are written.
        documents: The documents that are written.
        total: The bytes of all sources, or None if they are not known.
    """

    phase: Literal["sampling", "training the tokenizer", "tokenizing"]
    bytes: int = 0
    tokens: int = 0
    documents: int = 0
    total: int | None = None


@dataclass(frozen=True)
class _Options:
    seed: int
    val_fraction: float
    ends: bool
    workers: int


def prepare_corpus(
    sources: Sequence[Source],
    out: Path | str,
    *,
    tokenizer: Tokenizer | None = None,
    vocab_size: int = 4096,
    sample_bytes: int = 16_000_000,
    val_fraction: float = 0.02,
    seed: int = 1234,
    ends: bool = True,
    workers: int | None = 1,
    overwrite: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> TokenFolder:
    """Writes the documents of all sources, in order, to a token folder, and opens it.

    The same sources and arguments give the same bytes, with any number of workers and also if the
    preparation was stopped and begun again: it then goes on where it was, unless it had run for a
    few seconds only.

    Args:
        sources: The sources, all of one kind (`open_sources` checks that), which becomes the
            folder's kind.
        out: The folder.
        tokenizer: The tokenizer. None trains a byte-level BPE on a sample of the sources; for pairs
            it covers both languages.
        vocab_size: The most tokens of a tokenizer that is trained.
        sample_bytes: About how many bytes of text to train the tokenizer on.
        val_fraction: The fraction of the documents for validation, between 0 and 1.
        seed: The seed that decides which documents are for validation.
        ends: Whether the end-of-text token follows every document of running text.
        workers: How many processes tokenize; None means one for each core if there is much text.
        overwrite: Whether to replace a token folder at `out`.
        on_progress: Called with the progress.

    Raises:
        UserError: An argument or `out` cannot be used.
        DataError: A source cannot be read or contains no text.
    """
    out = Path(out)
    if not 0 < val_fraction < 1:
        raise UserError(f"val_fraction={val_fraction} must be between 0 and 1, for instance 0.02")
    if workers is not None and workers < 1:
        raise UserError(f"workers={workers} must be 1 or more")
    if not ends and sources[0].kind != "text":
        raise UserError("--eos none is for running text: documents of other kinds need an end")
    check_free(out, overwrite)
    sizes = [source.n_bytes for source in sources]
    count = workers_for(workers, None if None in sizes else sum(size or 0 for size in sizes))
    options = _Options(seed, val_fraction, ends, count)
    settings = {
        "version": VERSION,
        "seed": seed,
        "val_fraction": val_fraction,
        "ends": ends,
        "tokenizer": (tokenizer.to_json(), tokenizer.eos_token, tokenizer.bos_token)
        if tokenizer
        else (vocab_size, sample_bytes),
    }
    key = key_of(sources, settings)
    with resumable(out, overwrite, key) as work:
        if tokenizer is None and work.state is not None:
            tokenizer = Tokenizer.load(work.folder / TOKENIZER)
            tokenizer.origin = work.state.origin
        if tokenizer is None:
            tokenizer = _trained(sources, vocab_size, sample_bytes, on_progress)
        tokenizer.save(work.folder / TOKENIZER)
        index = _write(sources, work, key, tokenizer, options, on_progress)
        # The index is written last, because a folder does not open without it.
        (work.folder / INDEX).write_text(index.model_dump_json(indent=2) + "\n", encoding="utf-8")
        TokenFolder.open(work.folder)
    return TokenFolder.open(out)


def _trained(
    sources: Sequence[Source],
    vocab_size: int,
    sample_bytes: int,
    on_progress: Callable[[Progress], None],
) -> Tokenizer:
    on_progress(Progress("sampling"))
    texts = list(sample(sources, sample_bytes))
    if not texts:
        skipped: Counter[str] = Counter()
        for source in sources:  # read again to tell why, because samples count nothing
            deque(source.pieces(skipped), maxlen=0)
        raise _empty(sources, skipped)
    on_progress(Progress("training the tokenizer"))
    return Tokenizer.train(texts, vocab_size)


def sample(sources: Sequence[Source], limit: int) -> Iterator[str]:
    """Yields text of about `limit` bytes, the same amount from each source that has enough."""
    readers = [source.sample() for source in sources]
    taken = [0] * len(readers)
    live = list(range(len(readers)))
    while live and sum(taken) < limit:
        least = min(live, key=taken.__getitem__)
        piece = next(readers[least], None)
        if piece is None:
            live.remove(least)
        elif piece.text:
            text = encodable(piece.text)
            taken[least] += len(text.encode())
            yield text


def _write(
    sources: Sequence[Source],
    work: Unfinished,
    key: str,
    tokenizer: Tokenizer,
    options: _Options,
    on_progress: Callable[[Progress], None],
) -> Index:
    sizes = [source.n_bytes for source in sources]
    total = None if None in sizes else sum(size or 0 for size in sizes)
    state = work.state
    position, dropped = (state.position, state.dropped) if state else (Position(), 0)
    documents = list(state.documents) if state else [0] * len(sources)
    n_bytes = list(state.n_bytes) if state else [0] * len(sources)
    skipped: Counter[str] = Counter()
    dtype = token_dtype(tokenizer.vocab_size)
    kind = sources[0].kind
    eos_id = tokenizer.eos_id if options.ends else None
    with SplitWriter(
        work.folder,
        dtype,
        eos_id,
        options.seed,
        options.val_fraction,
        kind,
        bos_id=tokenizer.bos_id,
        state=state.writer if state else None,
    ) as writer:
        appender = _Appender(writer, kind == "pairs", dropped)
        read = batches(sources, skipped, position)
        for batch, encoded in tokenized(read, tokenizer, options.workers, dtype):
            before = writer.documents
            for ids, piece in zip(encoded.ids, batch.pieces, strict=True):
                appender.append(ids, piece.ends, piece.label)
            documents[batch.source] += writer.documents - before
            n_bytes[batch.source] += encoded.n_bytes
            on_progress(
                Progress("tokenizing", sum(n_bytes), writer.tokens, writer.documents, total)
            )
            if work.is_due and batch.pieces[-1].ends and appender.is_between:
                now = State(
                    key=key,
                    origin=tokenizer.origin,
                    position=batch.after,
                    documents=tuple(documents),
                    n_bytes=tuple(n_bytes),
                    dropped=appender.dropped,
                    writer=writer.state(),
                )
                work.save(now)
        skipped.update({NO_PAIR: appender.dropped} if appender.dropped else {})
        if not writer.documents:
            raise _empty(sources, skipped)
        if writer.rewrites:
            work.forget()
        splits = writer.finish()
        labels = writer.finish_labels()
    tokenizer.save(work.folder / TOKENIZER)
    return Index(
        kind=kind,
        languages=sources[0].languages,
        labels=labels,
        columns=writer.columns,
        dtype="uint16" if dtype.itemsize == 2 else "int32",
        vocab_size=tokenizer.vocab_size,
        eos_token=tokenizer.eos_token,
        eos_id=tokenizer.eos_id,
        bos_token=tokenizer.bos_token,
        ends=options.ends,
        seed=options.seed,
        val_fraction=options.val_fraction,
        train=splits["train"],
        val=splits["val"],
        tokenizer=TokenizerEntry(
            origin=tokenizer.origin, bytes=(work.folder / TOKENIZER).stat().st_size
        ),
        sources=tuple(
            SourceEntry(
                source=source.name,
                license=source.license,
                documents=documents[number],
                bytes=n_bytes[number],
                parts=source.parts,
            )
            for number, source in enumerate(sources)
        ),
        skipped=dict(sorted(skipped.items())),
    )


class _Appender:
    """Appends tokens to a writer. It holds back the first text of a pair until both are complete.

    Attributes:
        dropped: How many pairs were left out, because one of their texts has no tokens.
    """

    def __init__(self, writer: SplitWriter, pairs: bool, dropped: int) -> None:
        self._writer = writer
        self._pairs = pairs
        self.dropped = dropped
        self._texts: list[list[int]] = [[]]

    @property
    def is_between(self) -> bool:
        """Whether no document is open and no text of a pair is held back."""
        return self._writer.is_between and self._texts == [[]]

    def append(self, ids: NDArray[Any], ends: bool, label: str | None) -> None:
        if not self._pairs:
            self._writer.append(ids, ends, label)
            return
        self._texts[-1] += ids.tolist()
        if not ends:
            return
        if len(self._texts) == 1:
            self._texts.append([])
            return
        if not self._writer.append_pair(*self._texts):
            self.dropped += 1
        self._texts = [[]]


def _empty(sources: Sequence[Source], skipped: Counter[str]) -> DataError:
    left_out = ", ".join(f"{count} {what}" for what, count in skipped.items())
    return DataError(
        f"{', '.join(source.name for source in sources)}: there is no text to prepare"
        + (f" (left out: {left_out})" if left_out else "")
    )
