"""Turns texts, pairs of texts and labeled texts into a token folder."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from gridformer.data.prepare.reading import BATCH_CHARS, Cursor, Text, TextSource, pieces
from gridformer.data.prepare.records import NO_PAIR
from gridformer.data.prepare.split_file import Document
from gridformer.data.prepare.writer import (
    EncodedBatch,
    FolderSpec,
    WriteOptions,
    nothing_error,
    prepare_documents,
    trained_on,
)
from gridformer.data.tokenfolder import TokenFolder, token_dtype
from gridformer.data.tokenizer import Tokenizer, encodable
from gridformer.utils.errors import DataError, UserError

_NOTHING = "there is no text to prepare"


def prepare_corpus(
    sources: Sequence[TextSource],
    out: Path | str,
    *,
    tokenizer: Tokenizer | None = None,
    vocab_size: int = 4096,
    sample_bytes: int = 16_000_000,
    val_fraction: float = 0.02,
    seed: int = 1234,
    ends: bool = True,
    **options: Unpack[WriteOptions],
) -> TokenFolder:
    """Writes the documents of all sources, in order, to a token folder, and opens it.

    The same sources and arguments give the same bytes, with any number of workers and also if the
    preparation was stopped and begun again: it then goes on where it was, unless it had run for a
    few seconds only.

    Args:
        sources: The sources, all of one kind (`open_sources` checks that), which becomes the
            folder's kind.
        tokenizer: The tokenizer. None trains a byte-level BPE on a sample of the sources; for pairs
            it covers both languages.
        vocab_size: The most tokens of a tokenizer that is trained.
        sample_bytes: About how many bytes of text to train the tokenizer on.
        val_fraction: The fraction of the documents for validation, between 0 and 1.
        seed: The seed that decides which documents are for validation.
        ends: Whether the end-of-text token follows every document of running text.
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
        return trained_on(texts, vocab_size, lambda: _nothing(sources), options)

    spec: FolderSpec[Text] = FolderSpec(
        kind,
        lambda used: partial(_encoded, used),
        lambda item: sum(map(len, item.texts)),
        settings={} if tokenizer else {"tokenizer": (vocab_size, sample_bytes)},
        seed=seed,
        val_fraction=val_fraction,
        languages=sources[0].languages,
        begins=True,
        ends=ends,
        nothing=_NOTHING,
    )
    return prepare_documents(sources, out, spec, tokenizer or train, **options)


def sampled_text(sources: Sequence[TextSource], limit: int) -> Iterator[str]:
    """Yields text of about `limit` bytes, the same amount from each source that has enough."""
    readers = [
        (piece.text for item in source.sampled() for text in item.texts for piece in pieces([text]))
        for source in sources
    ]
    taken = [0] * len(readers)
    live = list(range(len(readers)))
    while live and sum(taken) < limit:
        least = min(live, key=taken.__getitem__)
        piece = next(readers[least], None)
        if piece is None:
            live.remove(least)
        elif piece:
            text = encodable(piece)
            taken[least] += len(text.encode())
            yield text


def _encoded(tokenizer: Tokenizer, items: Sequence[Text]) -> EncodedBatch:
    """Returns the documents of texts, which are tokenized in parts, and of pairs two each."""
    of_texts = [
        [encodable(piece.text) for piece in pieces([text])] for item in items for text in item.texts
    ]
    tokens = _tokenized(tokenizer, [part for parts in of_texts for part in parts])
    made: list[Document] = []
    dropped, each = Counter[str](), iter(of_texts)
    for item in items:
        both = []
        for _, parts in zip(item.texts, each):
            ids = np.concatenate([next(tokens) for _ in parts])
            both.append((ids, sum(len(part.encode()) for part in parts)))
        if item.second is not None and not all(len(ids) for ids, _ in both):
            dropped[NO_PAIR] += 1
            both = [(ids[:0], n) for ids, n in both]
        made += [Document(ids, None, item.label, None, n, item.ends) for ids, n in both]
    return made, dropped


def _tokenized(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[NDArray[Any]]:
    """Yields the tokens of texts, a bounded amount of which are lists of Python at a time."""
    dtype = token_dtype(tokenizer.vocab_size)
    some: list[str] = []
    n_chars = 0
    for number, text in enumerate(texts, start=1):
        some.append(text)
        n_chars += len(text)
        if number == len(texts) or n_chars >= BATCH_CHARS:
            yield from (np.asarray(ids, dtype) for ids in tokenizer.encode_batch(some))
            some, n_chars = [], 0


def _nothing(sources: Sequence[TextSource]) -> DataError:
    """Reads everything again to say why there is no text: sampling does not count what it skips."""
    skipped: Counter[str] = Counter()
    for source in sources:
        deque(source.read(skipped, Cursor()), maxlen=0)
    names = [source.name for source in sources]
    return nothing_error(names, _NOTHING, dict(sorted(skipped.items())))
