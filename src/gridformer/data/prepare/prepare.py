"""Turns a corpus into a token folder in one pass and in bounded memory."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gridformer.data.prepare.documents import (
    Document,
    DocumentSource,
    EncodedBatch,
    FolderSpec,
    OnProgress,
    nothing_error,
    prepare_documents,
    trained_on,
)
from gridformer.data.prepare.sources import Source
from gridformer.data.prepare.text_chunks import TextChunk
from gridformer.data.tokenfolder import TokenFolder, token_dtype
from gridformer.data.tokenizer import Tokenizer, encodable
from gridformer.utils.errors import DataError, UserError

_NOTHING = "there is no text to prepare"


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
    on_progress: OnProgress = lambda progress: None,
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
    kind = sources[0].kind
    if not ends and kind != "text":
        raise UserError("--eos none is for running text: documents of other kinds need an end")
    if tokenizer is not None and tokenizer.bos_token is not None and kind == "pairs":
        raise UserError(
            "--bos is not for pairs: a decoder already begins each text with its start token"
        )

    def train() -> Tokenizer:
        texts = partial(sampled_text, sources, sample_bytes)
        return trained_on(texts, vocab_size, on_progress, lambda: _nothing(sources))

    spec: FolderSpec[TextChunk] = FolderSpec(
        kind,
        lambda used: partial(_text_encoder, used, token_dtype(used.vocab_size)),
        lambda chunk: len(chunk.text),
        settings={} if tokenizer else {"tokenizer": (vocab_size, sample_bytes)},
        seed=seed,
        val_fraction=val_fraction,
        languages=sources[0].languages,
        begins=True,
        ends=ends,
        nothing=_NOTHING,
    )
    return prepare_documents(
        [_opened(source) for source in sources],
        out,
        spec,
        tokenizer or train,
        workers=workers,
        overwrite=overwrite,
        on_progress=on_progress,
    )


def sampled_text(sources: Sequence[Source], limit: int) -> Iterator[str]:
    """Yields text of about `limit` bytes, the same amount from each source that has enough."""
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


def _opened(source: Source) -> DocumentSource[TextChunk]:
    more = {name: getattr(source, name, None) for name in ("fields", "split", "revision")}
    return DocumentSource(
        source.name,
        source.chunks,
        files=getattr(source, "paths", ()),
        license=source.license,
        revision=repr(more),
        n_bytes=source.n_bytes,
        parts=source.parts,
    )


@contextlib.contextmanager
def _text_encoder(
    tokenizer: Tokenizer, dtype: np.dtype[Any]
) -> Iterator[Callable[[Sequence[TextChunk]], EncodedBatch]]:
    """Turns chunks of text into tokens; see Encoder."""

    def encode(chunks: Sequence[TextChunk]) -> EncodedBatch:
        texts = [encodable(chunk.text) for chunk in chunks]
        made = [
            Document(
                np.asarray(ids, dtype=dtype),
                label=chunk.label,
                n_bytes=len(text.encode()),
                ends=chunk.ends,
            )
            for ids, chunk, text in zip(tokenizer.encode_batch(texts), chunks, texts, strict=True)
        ]
        return made, Counter()

    yield encode


def _nothing(sources: Sequence[Source]) -> DataError:
    """Reads everything again to say why there is no text: sampling does not count what it skips."""
    skipped: Counter[str] = Counter()
    for source in sources:
        deque(source.chunks(skipped), maxlen=0)
    names = [source.name for source in sources]
    return nothing_error(names, _NOTHING, dict(sorted(skipped.items())))
