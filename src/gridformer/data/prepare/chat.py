"""Turns conversations into a token folder in which the tokens of answers are marked.

The folder's kind is `chat`. Its column `answer` says of each token whether it belongs to an answer,
and its column `first_answer` says of each document where its first such token is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from gridformer.data.chat import (
    ChatTemplate,
    Message,
    StoredChat,
    encode,
    has_answer,
    messages_of,
    spells_special,
    write_chat,
)
from gridformer.data.prepare.reading import Cursor, Source
from gridformer.data.prepare.records import RECORDS, Fields
from gridformer.data.prepare.sources import open_source
from gridformer.data.prepare.split_file import Document
from gridformer.data.prepare.writer import (
    EncodedBatch,
    FolderSpec,
    WriteOptions,
    nothing_error,
    prepare_documents,
    trained_on,
)
from gridformer.data.tokenfolder import Kind, TokenFolder, token_dtype
from gridformer.data.tokenizer import Tokenizer, encodable
from gridformer.data.tokensplit import Column
from gridformer.utils.errors import UserError

ANSWER, FIRST_ANSWER = "answer", "first_answer"
COLUMNS = {ANSWER: Column(per="token", dtype="uint8"), FIRST_ANSWER: Column(dtype="int32")}
NO_ANSWER = "conversations without an answer"
FORGED = "conversations that spell a special token"
_AT_A_TIME = 64  # conversations whose tokens are Python's lists at the same time
_NOTHING = "there are no conversations to prepare"

Conversation = list[Message]


class _Records(Fields):
    """Records that hold conversations."""

    @property
    def kind(self) -> Kind:
        return "chat"

    @property
    def options(self) -> dict[str, str]:
        return {}

    def columns(self, present: Sequence[str], where: str) -> list[str]:
        return [*present]

    def items(
        self, record: Mapping[str, Any], where: str, skipped: Counter[str]
    ) -> Iterator[Conversation]:
        yield messages_of(record, where)


def prepare_chat(
    specs: Sequence[str],
    out: Path,
    chat: StoredChat,
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

    The other arguments are those of `gridformer.data.prepare.corpus.prepare_corpus`.

    Args:
        specs: Files of JSON lines, tables, or data sets of Hugging Face.
        needed: Special tokens that the template writes; the tokenizer gets those it does not have.
    """

    def complete(tokenizer: Tokenizer) -> Tokenizer:
        tokenizer.add_special([token for token in needed if tokenizer.id_of(token) is None])
        return tokenizer

    def train() -> Tokenizer:
        texts = partial(_sample, sources, sample_bytes)
        empty = nothing_error(specs, _NOTHING, {})
        return complete(trained_on(texts, vocab_size - len(needed), lambda: empty, options))

    # A template that cannot be read is refused before anything is. Each worker opens its own.
    with chat.open() as template:
        sources = [open_source(spec, RECORDS, _Records(), split) for spec in specs]
        if unfit := next((one.name for one in sources if one.kind != "chat"), ""):
            raise UserError(f"{unfit}: --chat reads conversations, and this holds none")
        spec: FolderSpec[Conversation] = FolderSpec(
            "chat",
            lambda used: partial(_encoded, template, used),
            lambda messages: sum(len(message["content"]) for message in messages),
            {"chat": asdict(chat), "tokenizer": (vocab_size, sample_bytes, needed)},
            COLUMNS,
            lambda folder: write_chat(folder, chat),
            seed,
            val_fraction,
            nothing=_NOTHING,
        )
        used = complete(tokenizer) if tokenizer else train
        return prepare_documents(sources, out, spec, used, **options)


def _encoded(
    template: ChatTemplate, tokenizer: Tokenizer, conversations: Sequence[Conversation]
) -> EncodedBatch:
    """Returns the conversations as documents from which a model can learn."""
    dtype, documents, dropped = token_dtype(tokenizer.vocab_size), [], Counter[str]()
    usable = _usable(conversations, tokenizer, dropped)
    while some := [*islice(usable, _AT_A_TIME)]:
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


def _usable(
    conversations: Iterable[Conversation], tokenizer: Tokenizer, dropped: Counter[str]
) -> Iterator[Conversation]:
    for messages in conversations:
        if not has_answer(messages):
            dropped[NO_ANSWER] += 1
        elif spells_special(messages, tokenizer):
            dropped[FORGED] += 1
        else:
            yield messages


def _sample(sources: Sequence[Source[Conversation]], limit: int) -> Iterator[str]:
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
