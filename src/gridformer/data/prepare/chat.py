"""Turns conversations into a token folder in which the tokens of answers are marked.

The folder's kind is `chat`. Its column `answer` says of each token whether it belongs to an answer,
and its column `first_answer` says of each document where its first such token is.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from gridformer.data.chat.conversations import (
    Encoded,
    encode,
    has_answer,
    messages_of,
    spells_special,
)
from gridformer.data.chat.template import Message, StoredChat, write_chat
from gridformer.data.prepare import hf
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
from gridformer.data.prepare.files import JSON_LINES, TABLES, json_lines
from gridformer.data.prepare.reading import Cursor
from gridformer.data.prepare.records import Fields
from gridformer.data.tokenfolder import TokenFolder, token_dtype
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
    workers: int | None = 1,
    overwrite: bool = False,
    on_progress: OnProgress = lambda progress: None,
) -> TokenFolder:
    """Writes the conversations of all sources, in order, to a token folder, and opens it.

    Args:
        specs: Files of JSON lines, tables, or data sets of Hugging Face.
        out: The folder.
        chat: The template.
        needed: Special tokens that the template writes; the tokenizer gets those it does not have.
        split: The split of data sets.
        tokenizer, vocab_size, sample_bytes, val_fraction, seed, workers, overwrite, on_progress:
            See `gridformer.data.prepare.prepare.prepare_corpus`.

    Raises:
        UserError: An argument or `out` cannot be used.
        DataError: A source cannot be read or has no conversations, or the template refuses one.
    """
    chat.open().close()  # a template that cannot be read is refused before anything is
    sources = [_source(spec, split) for spec in specs]

    def complete(found: Tokenizer) -> Tokenizer:
        found.add_special([token for token in needed if found.id_of(token) is None])
        return found

    def train() -> Tokenizer:
        texts = partial(_sample, sources, sample_bytes)
        empty = nothing_error(specs, _NOTHING, {})
        return complete(trained_on(texts, vocab_size - len(needed), on_progress, lambda: empty))

    spec: FolderSpec[Conversation] = FolderSpec(
        "chat",
        lambda used: partial(_chat_encoder, used, chat, token_dtype(used.vocab_size)),
        lambda messages: sum(len(message["content"]) for message in messages),
        {
            "chat": chat.model_dump(),
            "split": split,
            "tokenizer": (vocab_size, sample_bytes, needed),
        },
        COLUMNS,
        lambda folder: write_chat(folder, chat),
        seed,
        val_fraction,
        nothing=_NOTHING,
    )
    return prepare_documents(
        sources,
        out,
        spec,
        complete(tokenizer) if tokenizer else train,
        workers=workers,
        overwrite=overwrite,
        on_progress=on_progress,
    )


@contextlib.contextmanager
def _chat_encoder(
    tokenizer: Tokenizer, chat: StoredChat, dtype: np.dtype[Any]
) -> Iterator[Callable[[Sequence[Conversation]], EncodedBatch]]:
    """Turns conversations into documents; see Encoder."""
    with chat.open() as template:

        def made(conversations: Sequence[Conversation]) -> EncodedBatch:
            documents, dropped = [], Counter[str]()
            usable = _usable(conversations, tokenizer, dropped)
            while some := [*islice(usable, _AT_A_TIME)]:
                for one, encoded in zip(some, encode(some, template, tokenizer)):
                    document = _document(one, encoded, dtype)
                    if document is None:
                        dropped[NO_ANSWER] += 1
                    else:
                        documents.append(document)
            return documents, dropped

        yield made


def _document(messages: Conversation, encoded: Encoded, dtype: np.dtype[Any]) -> Document | None:
    """Returns a conversation as a document; None if none of its tokens is to be learned."""
    answer = np.array(encoded.answer, dtype=np.uint8)
    first = next((i for i, said in enumerate(encoded.answer) if said and i), None)
    if first is None:
        return None
    return Document(
        np.array(encoded.ids, dtype=dtype),
        {ANSWER: answer, FIRST_ANSWER: first},
        n_bytes=sum(len(encodable(message["content"]).encode()) for message in messages),
    )


def _usable(
    conversations: Iterable[Conversation], tokenizer: Tokenizer, dropped: Counter[str]
) -> Iterator[Conversation]:
    """Yields conversations from which a model can learn, and counts the others."""
    for messages in conversations:
        if not has_answer(messages):
            dropped[NO_ANSWER] += 1
        elif spells_special(messages, tokenizer):
            dropped[FORGED] += 1
        else:
            yield messages


def _sample(sources: Sequence[DocumentSource[Conversation]], limit: int) -> Iterator[str]:
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


def _source(spec: str, split: str) -> DocumentSource[Conversation]:
    """Returns the conversations of a source."""
    path = Path(spec).expanduser()
    if spec.startswith("hf:"):
        table = hf.hub_source(spec, split, Fields())
    elif path.is_dir() and hf.is_saved(path):
        table = hf.saved_source(path, spec, split, Fields())
    elif path.is_file() and path.name.endswith((*JSON_LINES, *TABLES)):
        lines = path.name.endswith(JSON_LINES)
        read = partial(_of_lines, path) if lines else partial(_of_table, spec, hf.open_table(path))
        size = None if path.suffix == ".gz" else path.stat().st_size
        return DocumentSource(spec, read, (path,), n_bytes=size)
    else:
        raise UserError(
            f"{spec}: --chat reads conversations from {', '.join((*JSON_LINES, *TABLES))} files, "
            f"save_to_disk folders and hf:NAME, and this is none of them"
        )
    read = partial(_of_table, spec, table.table)
    # Its files do not tell its size: they hold other columns, and perhaps other splits.
    return DocumentSource(spec, read, table.paths, revision=table.revision)


def _of_table(
    name: str, table: Any, skipped: Counter[str], cursor: Cursor
) -> Iterator[Conversation]:
    for number, record in hf.records(name, table, skipped, cursor):
        yield messages_of(record, f"{name}, row {number}")


def _of_lines(path: Path, skipped: Counter[str], cursor: Cursor) -> Iterator[Conversation]:
    return (messages_of(record, where) for where, record in json_lines(path, skipped))
