"""Turns a corpus into a token folder in one pass and in bounded memory."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gridformer.data.prepare.records import NO_PAIR
from gridformer.data.prepare.replacing import check_free, written_whole
from gridformer.data.prepare.sources import Source
from gridformer.data.prepare.splitting import SplitWriter
from gridformer.data.prepare.text_chunks import Piece
from gridformer.data.tokenfolder import (
    INDEX,
    TOKENIZER,
    Index,
    SourceEntry,
    TokenFolder,
    TokenizerEntry,
    token_dtype,
)
from gridformer.data.tokenizer import Tokenizer, encodable
from gridformer.utils.errors import DataError, UserError

# Large enough to keep the tokenizer's threads busy; its results take about 100 bytes per token.
_BATCH_CHARS = 1 << 21
_BATCH_PIECES = 4096


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


def prepare_corpus(
    sources: Sequence[Source],
    out: Path | str,
    *,
    tokenizer: Tokenizer | None = None,
    vocab_size: int = 4096,
    sample_bytes: int = 16_000_000,
    val_fraction: float = 0.02,
    seed: int = 1234,
    overwrite: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> TokenFolder:
    """Writes the documents of all sources, in order, to a token folder, and opens it.

    The same sources and arguments give the same bytes.

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
        overwrite: Whether to replace a token folder at `out`.
        on_progress: Called with the progress.

    Raises:
        UserError: An argument or `out` cannot be used.
        DataError: A source cannot be read or contains no text.
    """
    out = Path(out)
    if not 0 < val_fraction < 1:
        raise UserError(f"val_fraction={val_fraction} must be between 0 and 1, for instance 0.02")
    check_free(out, overwrite)
    if tokenizer is None:
        on_progress(Progress("sampling"))
        texts = list(sample(sources, sample_bytes))
        if not texts:
            skipped: Counter[str] = Counter()
            for source in sources:  # read again to tell why, because samples count nothing
                deque(source.pieces(skipped), maxlen=0)
            raise _empty(sources, skipped)
        on_progress(Progress("training the tokenizer"))
        tokenizer = Tokenizer.train(texts, vocab_size)
        del texts
    with written_whole(out, overwrite) as folder:
        index = _write(sources, folder, tokenizer, seed, val_fraction, on_progress)
        # The index is written last, because a folder does not open without it.
        (folder / INDEX).write_text(index.model_dump_json(indent=2) + "\n", encoding="utf-8")
        TokenFolder.open(folder)
    return TokenFolder.open(out)


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
    folder: Path,
    tokenizer: Tokenizer,
    seed: int,
    val_fraction: float,
    on_progress: Callable[[Progress], None],
) -> Index:
    sizes = [source.n_bytes for source in sources]
    total = None if None in sizes else sum(size or 0 for size in sizes)
    skipped: Counter[str] = Counter()
    entries = []
    dtype = token_dtype(tokenizer.vocab_size)
    kind = sources[0].kind
    with SplitWriter(folder, dtype, tokenizer.eos_id, seed, val_fraction, kind) as writer:
        append = _PairAppender(writer, skipped) if kind == "pairs" else writer.append
        done = 0
        for source in sources:
            before, start = writer.documents, done
            for batch in _batches(source.pieces(skipped)):
                texts = [encodable(piece.text) for piece in batch]
                done += sum(len(text.encode()) for text in texts)
                for ids, piece in zip(tokenizer.encode_batch(texts), batch, strict=True):
                    append(ids, piece.ends, piece.label)
                now = Progress("tokenizing", done, writer.tokens, writer.documents, total)
                on_progress(now)
            entries.append(
                SourceEntry(
                    source=source.name,
                    license=source.license,
                    documents=writer.documents - before,
                    bytes=done - start,
                    parts=source.parts,
                )
            )
        if not writer.documents:
            raise _empty(sources, skipped)
        splits = writer.finish()
        labels = writer.finish_labels()
    tokenizer.save(folder / TOKENIZER)
    return Index(
        kind=kind,
        languages=sources[0].languages,
        labels=labels,
        columns=writer.columns,
        dtype="uint16" if dtype.itemsize == 2 else "int32",
        vocab_size=tokenizer.vocab_size,
        eos_token=tokenizer.eos_token,
        eos_id=tokenizer.eos_id,
        seed=seed,
        val_fraction=val_fraction,
        train=splits["train"],
        val=splits["val"],
        tokenizer=TokenizerEntry(
            origin=tokenizer.origin, bytes=(folder / TOKENIZER).stat().st_size
        ),
        sources=tuple(entries),
        skipped=dict(skipped),
    )


class _PairAppender:
    """Holds back the first text of a pair until the second is complete as well."""

    def __init__(self, writer: SplitWriter, skipped: Counter[str]) -> None:
        self._writer = writer
        self._skipped = skipped
        self._texts: list[list[int]] = [[]]

    def __call__(self, ids: Sequence[int], ends: bool, label: str | None) -> None:
        self._texts[-1] += ids
        if not ends:
            return
        if len(self._texts) == 1:
            self._texts.append([])
            return
        if not self._writer.append_pair(*self._texts):
            self._skipped[NO_PAIR] += 1
        self._texts = [[]]


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    chars = 0
    for piece in pieces:
        batch.append(piece)
        chars += len(piece.text)
        if chars >= _BATCH_CHARS or len(batch) >= _BATCH_PIECES:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _empty(sources: Sequence[Source], skipped: Counter[str]) -> DataError:
    left_out = ", ".join(f"{count} {what}" for what, count in skipped.items())
    return DataError(
        f"{', '.join(source.name for source in sources)}: there is no text to prepare"
        + (f" (left out: {left_out})" if left_out else "")
    )
