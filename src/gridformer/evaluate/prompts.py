"""Reads the files that generation and evaluation take: lines of text and JSON lines."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gridformer.checkpoint.manifest import KEPT, read_manifest
from gridformer.checkpoint.side_files import load_tokenizer, root_of
from gridformer.data.chat import (
    CHAT_FILE,
    SYSTEM,
    USER,
    ChatTemplate,
    Message,
    messages_of,
    open_template,
    read_chat,
    stop_ids,
)
from gridformer.utils import files
from gridformer.utils.errors import DataError, UserError
from gridformer.utils.units import GIB

JSON_LINES = (".jsonl", ".ndjson")
_MOST_BYTES = 4 * GIB  # of a text that is measured, which is read whole


def read_input_text(path: Path) -> str:
    """Returns the text of a file.

    Raises:
        DataError: It cannot be read, or is not UTF-8.
    """
    try:
        return files.read_text(path, _MOST_BYTES)
    except files.UnreadableError as error:
        raise DataError(str(error)) from None


def _lines(text: str) -> list[str]:
    """Returns the lines of a text. Unicode has other ends of lines, which JSON may contain."""
    return [line.removesuffix("\r") for line in text.split("\n")]


def read_records(path: Path) -> list[Any]:
    """Returns the values of a file of JSON lines; empty lines are left out.

    Raises:
        DataError: The file cannot be read, or a line is not JSON; the message names the line.
    """
    found = []
    for number, line in enumerate(_lines(read_input_text(path)), 1):
        if line.strip():
            try:
                found.append(files.parse_json(line))
            except ValueError as error:
                raise DataError(f"{path}:{number}: is not JSON ({error})") from None
    return found


def read_fields(path: Path, *keys: str) -> list[tuple[Any, ...]]:
    """Returns the values of some keys of each object in a file of JSON lines.

    Raises:
        DataError: An object lacks a key, or the file has none; the message names the record.
    """
    found = []
    for number, record in enumerate(read_records(path), 1):
        if not isinstance(record, dict) or any(key not in record for key in keys):
            raise DataError(
                f"{path}: record {number} must be an object with the keys {', '.join(keys)}"
            )
        found.append(tuple(record[key] for key in keys))
    if not found:
        raise DataError(f"{path}: has no records: write one JSON object a line")
    return found


def read_texts(path: Path, *keys: str) -> list[tuple[str, ...]]:
    """Returns the texts under some keys of each object in a file of JSON lines.

    Raises:
        DataError: See `read_fields`; or the value of a key is not a text.
    """
    found = read_fields(path, *keys)
    for number, values in enumerate(found, 1):
        for key, value in zip(keys, values):
            if not isinstance(value, str):
                kind = type(value).__name__
                raise DataError(f"{path}: record {number}: {key} must be a text and is {kind}")
    return found


def read_prompts(path: Path) -> list[str]:
    """Returns the prompts of a file: its lines, or in JSON lines the values of `prompt`.

    Empty lines are left out. A line of JSON may also be a text.

    Raises:
        DataError: The file cannot be read, has no prompts, or a prompt is not text.
    """
    if path.suffix in JSON_LINES:
        values = [
            record.get("prompt") if isinstance(record, dict) else record
            for record in read_records(path)
        ]
        texts = [value for value in values if isinstance(value, str)]
        if len(texts) < len(values):
            number = next(i for i, value in enumerate(values, 1) if not isinstance(value, str))
            raise DataError(
                f"{path}: record {number} must be a text, or an object with a text under prompt"
            )
    else:
        texts = [line for line in _lines(read_input_text(path)) if line.strip()]
    if not texts:
        raise DataError(f"{path}: has no prompts: write one per line")
    return texts


def read_conversations(path: Path) -> list[list[Message]]:
    """Returns conversations to go on: those under `messages` of JSON lines, or lines of users.

    Raises:
        DataError: The file cannot be read, or has no conversations.
    """
    if path.suffix not in JSON_LINES:
        return [said_by_user(text) for text in read_prompts(path)]
    found = []
    for number, record in enumerate(read_records(path), 1):
        where = f"{path}: record {number}"
        if isinstance(record, dict) and "messages" in record:
            found.append(messages_of(record, where))
        elif isinstance(record, dict) and isinstance(record.get("prompt"), str):
            found.append(said_by_user(record["prompt"]))
        else:
            raise DataError(f"{where} must be an object with a text under prompt, or messages")
    if not found:
        raise DataError(f"{path}: has no prompts: write one per line")
    return found


def said_by_user(text: str) -> list[Message]:
    """Returns a conversation that a user begins."""
    return [{"role": USER, "content": text}]


def said_by_system(text: str, messages: list[Message]) -> list[Message]:
    """Returns a conversation with a message of the system before it."""
    return [{"role": SYSTEM, "content": text}, *messages]


@dataclass(frozen=True)
class ChatPrompts:
    """Conversations that a model is to go on.

    Attributes:
        texts: The text of each, in which special tokens are spelled out.
        shown: What the user wrote last in each.
        stops: The ids of tokens that end an answer.
    """

    texts: tuple[str, ...]
    shown: tuple[str, ...]
    stops: frozenset[int]


def chat_prompts(folder: Path, conversations: Sequence[Sequence[Message]]) -> ChatPrompts:
    """Renders conversations with the template of a checkpoint.

    Args:
        folder: The checkpoint.
        conversations: The messages of each so far.

    Raises:
        DataError: There is no template, or it refuses a conversation.
    """
    tokenizer = load_tokenizer(folder, read_manifest(folder))
    with stored_chat(folder) as template:
        texts = [template.prompt(messages) for messages in conversations]
        stops = frozenset({tokenizer.eos_id, *stop_ids(template, tokenizer)})
    shown = [messages[-1]["content"] for messages in conversations]
    return ChatPrompts(tuple(texts), tuple(shown), stops)


def stored_chat(folder: Path) -> ChatTemplate:
    """Returns the chat template of a checkpoint: that of its run's data, or of its import.

    Raises:
        DataError: There is none.
    """
    root = root_of(folder)
    if (root / CHAT_FILE).is_file():
        return read_chat(root)
    if (root / KEPT).is_dir():
        with suppress(UserError):
            return open_template("tokenizer", root / KEPT)[0]
    raise DataError(
        f"{root} has no chat template: --chat is for models that were trained with "
        f"data.task=chat, or imported with a template"
    )
