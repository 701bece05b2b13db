"""Turns conversations into a token folder in which the tokens of answers are marked.

The folder's kind is `chat`. Its column `answer` says of each token whether it belongs to an answer,
and its column `first_answer` says of each document where its first such token is.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from gridformer.data.chat.encoding import Encoded, encode, spells_special
from gridformer.data.chat.messages import Message, has_answer, messages_of
from gridformer.data.chat.stored import StoredChat, write_chat
from gridformer.data.columns import Column
from gridformer.data.prepare import hf
from gridformer.data.prepare.documents import (
    Document,
    EncodedDocuments,
    Making,
    SourcePart,
    prepare_documents,
)
from gridformer.data.prepare.files import JSON_LINES, TABLES, json_lines
from gridformer.data.prepare.place import ReadingPlace
from gridformer.data.prepare.progress import PrepareProgress
from gridformer.data.prepare.records import Fields
from gridformer.data.prepare.replacing import check_free
from gridformer.data.prepare.tokenizing import PickledTokenizer
from gridformer.data.prepare.writing import sampled
from gridformer.data.tokenfolder import TokenFolder, token_dtype
from gridformer.data.tokenizer import Tokenizer, encodable
from gridformer.utils.errors import DataError, UserError

ANSWER, FIRST_ANSWER = "answer", "first_answer"
COLUMNS = {ANSWER: Column(per="token", dtype="uint8"), FIRST_ANSWER: Column(dtype="int32")}
NO_ANSWER = "conversations without an answer"
FORGED = "conversations that spell a special token"
_AT_A_TIME = 64  # conversations whose tokens are Python's lists at the same time
_NOTHING = "there are no conversations to prepare"

Conversation = list[Message]


@dataclass(frozen=True)
class ChatEncoder:
    """Turns conversations into documents."""

    tokenizer: PickledTokenizer
    chat: StoredChat
    dtype: np.dtype[Any]

    @contextlib.contextmanager
    def begin(self) -> Iterator[Callable[[Sequence[Conversation]], EncodedDocuments]]:
        """See Encoder."""
        tokenizer = self.tokenizer.unpacked()
        with self.chat.open() as template:

            def made(conversations: Sequence[Conversation]) -> EncodedDocuments:
                found, dropped = [], Counter[str]()
                usable = _usable(conversations, tokenizer, dropped)
                while some := [*islice(usable, _AT_A_TIME)]:
                    for one, encoded in zip(some, encode(some, template, tokenizer)):
                        document = _document(one, encoded, self.dtype)
                        if document is None:
                            dropped[NO_ANSWER] += 1
                        else:
                            found.append(document)
                return EncodedDocuments(found, dropped)

            yield made


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
    on_progress: Callable[[PrepareProgress], None] = lambda progress: None,
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
    if not 0 < val_fraction < 1:
        raise UserError(f"val_fraction={val_fraction} must be between 0 and 1, for instance 0.02")
    check_free(out, overwrite)
    chat.open().close()  # a template that cannot be read is refused before anything is
    parts = [_part(spec, split) for spec in specs]

    def complete(found: Tokenizer) -> Tokenizer:
        found.add_special([token for token in needed if found.id_of(token) is None])
        return found

    def train() -> Tokenizer:
        texts = partial(_sample, parts, sample_bytes)
        empty = DataError(f"{', '.join(specs)}: {_NOTHING}")
        return complete(sampled(texts, vocab_size - len(needed), on_progress, lambda: empty))

    making = Making(
        "chat",
        lambda found: ChatEncoder(PickledTokenizer.of(found), chat, token_dtype(found.vocab_size)),
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
        _NOTHING,
    )
    return prepare_documents(
        parts,
        out,
        making,
        complete(tokenizer) if tokenizer else train,
        workers=workers,
        overwrite=overwrite,
        on_progress=on_progress,
    )


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


def _sample(parts: Sequence[SourcePart[Conversation]], limit: int) -> Iterator[str]:
    """Yields about `limit` bytes of messages, the same amount from each source that has enough."""
    for part in parts:
        taken = 0
        for messages in part.read(Counter(), ReadingPlace()):
            for message in messages:
                text = encodable(message["content"])
                taken += len(text.encode())
                yield text
            if taken >= limit / len(parts):
                break


def _part(spec: str, split: str) -> SourcePart[Conversation]:
    """Returns the conversations of a source."""
    path = Path(spec).expanduser()
    if spec.startswith("hf:"):
        found = hf.hub_source(spec, split, Fields())
    elif path.is_dir() and hf.is_saved(path):
        found = hf.saved_source(path, spec, split, Fields())
    elif path.is_file() and path.name.endswith(JSON_LINES):
        return SourcePart(spec, partial(_of_lines, path), files=(path,))
    elif path.is_file() and path.name.endswith(TABLES):
        return SourcePart(spec, partial(_of_table, spec, hf.open_table(path)), files=(path,))
    else:
        raise UserError(
            f"{spec}: --chat reads conversations from {', '.join((*JSON_LINES, *TABLES))} files, "
            f"save_to_disk folders and hf:NAME, and this is none of them"
        )
    return SourcePart(
        spec,
        partial(_of_table, spec, found.table),
        files=found.paths,
        revision=found.revision,
        sized=False,
    )


def _of_table(
    name: str, table: Any, skipped: Counter[str], place: ReadingPlace
) -> Iterator[Conversation]:
    for number, record in hf.records(name, table, skipped, place):
        yield messages_of(record, f"{name}, row {number}")


def _of_lines(path: Path, skipped: Counter[str], place: ReadingPlace) -> Iterator[Conversation]:
    return (messages_of(record, where) for where, record in json_lines(path, skipped))
