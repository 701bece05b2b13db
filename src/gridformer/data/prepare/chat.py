"""Conversations become a token folder in which the tokens of answers are marked.

The folder's kind is `chat`. Its column `answer` says of each token whether it belongs to an answer,
and `first_answer` of each document where its first such token is.
"""

from __future__ import annotations

import gzip
import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from gridformer.data.chat.encoding import encode, spells_special
from gridformer.data.chat.messages import Message, has_answer, messages_of
from gridformer.data.chat.stored import StoredChat, write_chat
from gridformer.data.columns import Column
from gridformer.data.prepare import hf
from gridformer.data.prepare.files import JSON_LINES, TABLES
from gridformer.data.prepare.prepare import Progress
from gridformer.data.prepare.records import Fields
from gridformer.data.prepare.replacing import check_free, written_whole
from gridformer.data.prepare.splitting import SplitWriter
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
from gridformer.utils.files import parse_json

ANSWER, FIRST_ANSWER = "answer", "first_answer"
COLUMNS = {ANSWER: Column(per="token", dtype="uint8"), FIRST_ANSWER: Column(dtype="int32")}
NO_ANSWER = "conversations without an answer"
FORGED = "conversations that spell a special token"
_AT_A_TIME = 64  # conversations


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
    overwrite: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> TokenFolder:
    """Writes the conversations of all sources, in order, to a token folder, and opens it.

    Args:
        specs: Files of JSON lines, tables, or data sets of Hugging Face.
        out: The folder.
        chat: The template.
        needed: Special tokens that the template writes; the tokenizer gets those it does not have.
        split: The split of data sets.
        tokenizer, vocab_size, sample_bytes, val_fraction, seed, overwrite, on_progress: See
            `gridformer.data.prepare.prepare.prepare_corpus`.

    Raises:
        UserError: An argument or `out` cannot be used.
        DataError: A source cannot be read or has no conversations, or the template refuses one.
    """
    if not 0 < val_fraction < 1:
        raise UserError(f"val_fraction={val_fraction} must be between 0 and 1, for instance 0.02")
    check_free(out, overwrite)
    readers = [_reader(spec, split) for spec in specs]
    if tokenizer is None:
        on_progress(Progress("sampling"))
        texts = list(_sample(readers, sample_bytes))
        if not texts:
            raise DataError(f"{', '.join(specs)}: there are no conversations to prepare")
        on_progress(Progress("training the tokenizer"))
        tokenizer = Tokenizer.train(texts, vocab_size - len(needed))
    tokenizer.add_special([token for token in needed if tokenizer.id_of(token) is None])
    skipped: Counter[str] = Counter()
    dtype = token_dtype(tokenizer.vocab_size)
    entries, n_bytes = [], 0
    with (
        written_whole(out, overwrite) as folder,
        SplitWriter(folder, dtype, tokenizer.eos_id, seed, val_fraction, "chat", COLUMNS) as writer,
        chat.open() as template,
    ):
        for spec, read in zip(specs, readers):
            before, start = writer.documents, n_bytes
            usable = _usable(read(), tokenizer, skipped)
            while some := list(itertools.islice(usable, _AT_A_TIME)):
                n_bytes += sum(len(m["content"].encode()) for one in some for m in one)
                for encoded in encode(some, template, tokenizer):
                    first = next((i for i, said in enumerate(encoded.answer) if said and i), None)
                    if first is None:
                        skipped[NO_ANSWER] += 1
                        continue
                    values = {ANSWER: encoded.answer, FIRST_ANSWER: first}
                    writer.append(encoded.ids, True, values=values)
                on_progress(Progress("tokenizing", n_bytes, writer.tokens, writer.documents))
            entries.append(
                SourceEntry(
                    source=spec,
                    license=None,
                    documents=writer.documents - before,
                    bytes=n_bytes - start,
                )
            )
        if not writer.documents:
            left_out = ", ".join(f"{count} {what}" for what, count in skipped.items())
            raise DataError(
                f"{', '.join(specs)}: there are no conversations to prepare"
                + (f" (left out: {left_out})" if left_out else "")
            )
        splits = writer.finish()
        tokenizer.save(folder / TOKENIZER)
        write_chat(folder, chat)
        index = Index(
            kind="chat",
            columns=COLUMNS,
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
        # The index is written last, because a folder does not open without it.
        (folder / INDEX).write_text(index.model_dump_json(indent=2) + "\n", encoding="utf-8")
        TokenFolder.open(folder)
    return TokenFolder.open(out)


def _usable(
    records: Iterator[list[Message]], tokenizer: Tokenizer, skipped: Counter[str]
) -> Iterator[list[Message]]:
    """Yields conversations from which a model can learn, and counts the others."""
    for messages in records:
        if not has_answer(messages):
            skipped[NO_ANSWER] += 1
        elif spells_special(messages, tokenizer):
            skipped[FORGED] += 1
        else:
            yield messages


def _sample(readers: Sequence[Callable[[], Iterator[list[Message]]]], limit: int) -> Iterator[str]:
    """Yields about `limit` bytes of messages, the same amount from each source that has enough."""
    for read in readers:
        taken = 0
        for messages in read():
            for message in messages:
                text = encodable(message["content"])
                taken += len(text.encode())
                yield text
            if taken >= limit / len(readers):
                break


def _reader(spec: str, split: str) -> Callable[[], Iterator[list[Message]]]:
    """Returns what reads the conversations of a source, from the start each time."""
    path = Path(spec).expanduser()
    if spec.startswith("hf:"):
        table = hf.hub_source(spec, split, Fields()).table
    elif path.is_dir() and hf.is_saved(path):
        table = hf.saved_source(path, spec, split, Fields()).table
    elif path.is_file() and path.name.endswith(JSON_LINES):
        return lambda: _of_lines(path)
    elif path.is_file() and path.name.endswith(TABLES):
        table = hf.open_table(path)
    else:
        raise UserError(
            f"{spec}: --chat reads conversations from {', '.join((*JSON_LINES, *TABLES))} files, "
            f"save_to_disk folders and hf:NAME, and this is none of them"
        )
    return lambda: (
        messages_of(record, f"{spec}, row {number}") for number, record in enumerate(table)
    )


def _of_lines(path: Path) -> Iterator[list[Message]]:
    try:
        with (
            cast(BinaryIO, gzip.open(path, "rb"))
            if path.suffix == ".gz"
            else path.open("rb") as file
        ):
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                where = f"{path}, line {number}"
                try:
                    record = parse_json(line.decode("utf-8", "replace"))
                except ValueError as error:
                    raise DataError(f"{where}: is not JSON ({error})") from None
                if not isinstance(record, dict):
                    raise DataError(f"{where}: is {type(record).__name__}, not an object with keys")
                yield messages_of(record, where)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
