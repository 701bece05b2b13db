"""Turns a corpus into a token folder in one pass and in bounded memory."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from gridformer.data.prepare.progress import PrepareProgress
from gridformer.data.prepare.reading import chunk_reader
from gridformer.data.prepare.records import NO_PAIR
from gridformer.data.prepare.replacing import check_free
from gridformer.data.prepare.resuming import Unfinished, resumable, resume_key
from gridformer.data.prepare.sources import Source
from gridformer.data.prepare.splitting import SplitWriter
from gridformer.data.prepare.text_chunks import TextChunk
from gridformer.data.prepare.tokenizing import (
    EncodedTexts,
    PickledTokenizer,
    TextEncoder,
    workers_for,
)
from gridformer.data.prepare.writing import (
    Described,
    Input,
    Written,
    finish,
    sampled,
    saved_tokenizer,
    write_batches,
)
from gridformer.data.tokenfolder import VERSION, SourceEntry, TokenFolder, token_dtype
from gridformer.data.tokenizer import Tokenizer, encodable
from gridformer.utils.errors import DataError, UserError


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
    on_progress: Callable[[PrepareProgress], None] = lambda progress: None,
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
    if tokenizer is not None and tokenizer.bos_token is not None and sources[0].kind == "pairs":
        raise UserError(
            "--bos is not for pairs: a decoder already begins each text with its start token"
        )
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
    described = [_described(one) for one in sources]
    files = [path for one in sources for path in getattr(one, "paths", ())]
    key = resume_key(described, files, settings)

    def train() -> Tokenizer:
        texts = partial(sampled_text, sources, sample_bytes)
        return sampled(texts, vocab_size, on_progress, lambda: _nothing(sources))

    with resumable(out, overwrite, key) as work:
        _write(sources, work, key, saved_tokenizer(work, tokenizer or train), options, on_progress)
    return TokenFolder.open(out)


def sampled_text(sources: Sequence[Source], limit: int) -> Iterator[str]:
    """Yields text of about `limit` bytes, the same amount from each source that has enough.

    Args:
        sources: The sources, of which each yields its own sample.
        limit: About how many bytes of text are yielded.
    """
    readers = [source.sample() for source in sources]
    taken = [0] * len(readers)
    live = list(range(len(readers)))
    while live and sum(taken) < limit:
        least = min(live, key=taken.__getitem__)
        chunk = next(readers[least], None)
        if chunk is None:
            live.remove(least)
        elif chunk.text:
            text = encodable(chunk.text)
            taken[least] += len(text.encode())
            yield text


def _described(source: Source) -> tuple[object, ...]:
    """Returns what determines the documents of a source, its files aside."""
    more = {name: getattr(source, name, None) for name in ("fields", "split", "revision")}
    return source.name, source.kind, source.languages, source.n_bytes, repr(more)


def _write(
    sources: Sequence[Source],
    work: Unfinished,
    key: str,
    tokenizer: Tokenizer,
    options: _Options,
    on_progress: Callable[[PrepareProgress], None],
) -> None:
    sizes = [source.n_bytes for source in sources]
    dtype = token_dtype(tokenizer.vocab_size)
    given = Input(
        [chunk_reader(source) for source in sources],
        lambda chunk: len(chunk.text),
        TextEncoder(PickledTokenizer.of(tokenizer), dtype),
        options.workers,
        None if None in sizes else sum(size or 0 for size in sizes),
    )
    with SplitWriter(
        work.folder,
        dtype,
        tokenizer.eos_id if options.ends else None,
        options.seed,
        options.val_fraction,
        sources[0].kind,
        bos_id=tokenizer.bos_id,
        state=work.state.writer if work.state else None,
    ) as writer:
        dropped = work.state.dropped if work.state else {}
        appender = _Appender(writer, sources[0].kind == "pairs", dropped)
        done = write_batches(work, key, tokenizer.origin, writer, appender, given, on_progress)
        if not writer.documents:
            raise _empty(sources, done)
        entries = tuple(
            SourceEntry(
                source=source.name,
                license=source.license,
                documents=done.documents[number],
                bytes=done.n_bytes[number],
                parts=source.parts,
            )
            for number, source in enumerate(sources)
        )
        described = Described(
            options.seed,
            options.val_fraction,
            entries,
            done.skipped,
            sources[0].languages,
            options.ends,
        )
        finish(work, writer, tokenizer, described)


class _Appender:
    """Appends chunks to a writer. It holds back the first text of a pair until both are complete.

    Attributes:
        dropped: Counts pairs that were left out, because one of their texts has no tokens.
    """

    def __init__(self, writer: SplitWriter, pairs: bool, dropped: Mapping[str, int]) -> None:
        self._writer = writer
        self._pairs = pairs
        self.dropped = Counter(dropped)
        self._texts: list[list[int]] = [[]]
        self._ended = True

    @property
    def is_between(self) -> bool:
        """Whether no document is open and no text of a pair is held back."""
        return self._ended and self._writer.is_between and self._texts == [[]]

    def append(self, source: int, chunks: Sequence[TextChunk], made: EncodedTexts) -> int:
        """See Appender."""
        for ids, chunk in zip(made.ids, chunks, strict=True):
            self._append(ids, chunk.ends, chunk.label)
        self._ended = chunks[-1].ends
        return made.n_bytes

    def _append(self, ids: NDArray[Any], ends: bool, label: str | None) -> None:
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
            self.dropped[NO_PAIR] += 1
        self._texts = [[]]


def _nothing(sources: Sequence[Source]) -> DataError:
    """Reads everything again to say why there is no text: sampling does not count what it skips."""
    skipped: Counter[str] = Counter()
    for source in sources:
        deque(source.chunks(skipped), maxlen=0)
    return _empty(sources, Written([], [], dict(skipped)))


def _empty(sources: Sequence[Source], done: Written) -> DataError:
    names = ", ".join(source.name for source in sources)
    return DataError(f"{names}: there is no text to prepare{done.left_out}")
