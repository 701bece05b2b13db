"""Turns texts, pairs of texts, labeled texts and conversations into a token folder.

In a folder of conversations (kind `chat`) the column `answer` says of each token whether it belongs
to an answer, and `first_answer` says of each document where its first such token is.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from gridformer.data.chat import (
    ASSISTANT,
    ChatTemplate,
    Message,
    encode,
    spells_special,
    write_chat,
)
from gridformer.data.prepare.reading import BATCH_CHARS, Cursor, Source, Text, TextSource, pieces
from gridformer.data.prepare.records import NO_PAIR, RECORDS, Fields
from gridformer.data.prepare.sources import open_source
from gridformer.data.prepare.split_file import Document
from gridformer.data.prepare.writer import (
    EncodedBatch,
    FolderSpec,
    PrepareProgress,
    WriteOptions,
    nothing_error,
    prepare_documents,
)
from gridformer.data.tokenfolder import TokenFolder, token_dtype
from gridformer.data.tokenizer import Tokenizer, encodable
from gridformer.data.tokensplit import Column
from gridformer.utils.errors import DataError, UserError

ANSWER, FIRST_ANSWER = "answer", "first_answer"
COLUMNS = {ANSWER: Column(per="token", dtype="uint8"), FIRST_ANSWER: Column(dtype="int32")}
NO_ANSWER = "conversations without an answer"
FORGED = "conversations that spell a special token"
_AT_A_TIME = 64  # conversations whose tokens are Python's lists at the same time
_NOTHING, _NO_CHATS = "there is no text to prepare", "there are no conversations to prepare"

Conversation = list[Message]


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
    preparation was stopped and begun again: it then goes on where it was.

    Args:
        sources: The sources, all of one kind (`open_sources` checks that), the folder's.
        tokenizer: None trains a byte-level BPE of at most `vocab_size` tokens on about
            `sample_bytes` of all sources, for pairs of both languages.
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
        sample = sampled_text(sources, sample_bytes)
        return _trained(sample, vocab_size, lambda: _nothing(sources), options)

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


def prepare_chat(
    specs: Sequence[str],
    out: Path,
    chat: ChatTemplate,
    needed: Sequence[str] = (),
    *,
    split: str = "train",
    tokenizer: Tokenizer | None = None,
    vocab_size: int = 4096,
    sample_bytes: int = 16_000_000,
    val_fraction: float = 0.02,
    seed: int = 1234,
    **options: Unpack[WriteOptions],
) -> TokenFolder:
    """Writes the conversations of all sources, in order, to a token folder, and opens it.

    The other arguments are those of `prepare_corpus`.

    Args:
        specs: Files of JSON lines, tables, folders of them, or data sets of Hugging Face.
        needed: Special tokens that the template writes; the tokenizer gets those it does not have.
    """

    def complete(tokenizer: Tokenizer) -> Tokenizer:
        tokenizer.add_special([token for token in needed if tokenizer.id_of(token) is None])
        return tokenizer

    def train() -> Tokenizer:
        sample = _sampled_chats(sources, sample_bytes)
        empty = nothing_error(specs, _NO_CHATS, {})
        return complete(_trained(sample, vocab_size - len(needed), lambda: empty, options))

    # A template that cannot be read is refused before anything is.
    with chat:
        sources = [open_source(spec, RECORDS, Fields(chat=True), split) for spec in specs]
        if unfit := next((one.name for one in sources if one.kind != "chat"), ""):
            raise UserError(f"{unfit}: --chat reads conversations, and this holds none")
        asked = (chat.template, chat.special, chat.origin)
        spec: FolderSpec[Conversation] = FolderSpec(
            "chat",
            lambda used: partial(_encoded_chats, chat, used),
            lambda messages: sum(len(message["content"]) for message in messages),
            {"chat": asked, "tokenizer": (vocab_size, sample_bytes, needed)},
            COLUMNS,
            lambda folder: write_chat(folder, chat),
            seed,
            val_fraction,
            nothing=_NO_CHATS,
        )
        used = complete(tokenizer) if tokenizer else train
        return prepare_documents(sources, out, spec, used, **options)


def _trained(
    texts: Iterable[str], vocab_size: int, empty: Callable[[], Exception], options: WriteOptions
) -> Tokenizer:
    """Trains a tokenizer on a sample; if there is none, it raises what `empty` returns."""
    on_progress = options.get("on_progress", lambda progress: None)
    on_progress(PrepareProgress("sampling"))
    sample = list(texts)
    if not sample:
        raise empty()
    on_progress(PrepareProgress("training the tokenizer"))
    return Tokenizer.train(sample, vocab_size)


# --------------------------------------------------------------------------- texts


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


# --------------------------------------------------------------------------- conversations


def _encoded_chats(
    template: ChatTemplate, tokenizer: Tokenizer, conversations: Sequence[Conversation]
) -> EncodedBatch:
    """Returns the conversations as documents from which a model can learn."""
    dtype, documents, dropped = token_dtype(tokenizer.vocab_size), [], Counter[str]()

    def usable() -> Iterator[Conversation]:
        for messages in conversations:
            if not any(m["role"] == ASSISTANT and m["content"].strip() for m in messages):
                dropped[NO_ANSWER] += 1
            elif spells_special(messages, tokenizer):
                dropped[FORGED] += 1
            else:
                yield messages

    rest = usable()
    while some := [*islice(rest, _AT_A_TIME)]:
        for messages, encoded in zip(some, encode(some, template, tokenizer)):
            first = next((i for i, said in enumerate(encoded.answer) if said and i), None)
            if first is None:
                dropped[NO_ANSWER] += 1
                continue
            answer = np.array(encoded.answer, dtype=np.uint8)
            n_bytes = sum(len(encodable(message["content"]).encode()) for message in messages)
            columns = {ANSWER: answer, FIRST_ANSWER: first}
            ids = np.array(encoded.ids, dtype=dtype)
            documents.append(Document(ids, columns, n_bytes=n_bytes))
    return documents, dropped


def _sampled_chats(sources: Sequence[Source[Conversation]], limit: int) -> Iterator[str]:
    """Yields about `limit` bytes of messages, the same amount from each source that has enough."""
    for source in sources:
        taken = 0
        for messages in source.read(Counter(), Cursor()):
            for message in messages:
                text = encodable(message["content"])
                taken += len(text.encode())
                yield text
            if taken >= limit / len(sources):
                break
