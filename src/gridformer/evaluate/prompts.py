"""Reads the files that generation and evaluation take: lines of text and JSON lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

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

Item = TypeVar("Item")
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


def _lines(path: Path) -> list[str]:
    """Returns the lines of a file. Unicode has other ends of lines, which JSON may contain."""
    return [line.removesuffix("\r") for line in read_input_text(path).split("\n")]


def _records(path: Path) -> list[Any]:
    """Returns the values of a file of JSON lines; empty lines are left out."""
    records = []
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            try:
                records.append(files.parse_json(line))
            except ValueError as error:
                raise DataError(f"{path}:{number}: is not JSON ({error})") from None
    return records


def read_fields(path: Path, *keys: str) -> list[tuple[Any, ...]]:
    """Returns the values of some keys of each object in a file of JSON lines.

    Raises:
        DataError: The file cannot be read or has no records, a line is not JSON, or an object lacks
            a key.
    """
    records = _records(path)
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict) or any(key not in record for key in keys):
            raise DataError(
                f"{path}: record {number} must be an object with the keys {', '.join(keys)}"
            )
    if not records:
        raise DataError(f"{path}: has no records: write one JSON object a line")
    return [tuple(record[key] for key in keys) for record in records]


def read_texts(path: Path, *keys: str) -> list[tuple[str, ...]]:
    """Returns the texts under some keys of each object in a file of JSON lines.

    Raises:
        DataError: As for `read_fields`, or the value of a key is not a text.
    """
    records = read_fields(path, *keys)
    for number, values in enumerate(records, 1):
        for key, value in zip(keys, values):
            if not isinstance(value, str):
                kind = type(value).__name__
                raise DataError(f"{path}: record {number}: {key} must be a text and is {kind}")
    return records


def read_prompts(path: Path) -> list[str]:
    """Returns the prompts of a file: its lines, or in JSON lines the values of `prompt`.

    Empty lines are left out. A line of JSON may also be a text.

    Raises:
        DataError: The file cannot be read, has no prompts, or a prompt is not text.
    """

    def prompt(record: Any, where: str) -> str:
        text = record.get("prompt") if isinstance(record, dict) else record
        if not isinstance(text, str):
            raise DataError(f"{where} must be a text, or an object with a text under prompt")
        return text

    return _each(path, prompt, str)


def read_conversations(path: Path) -> list[list[Message]]:
    """Returns conversations to go on: those under `messages` of JSON lines, or lines of users.

    Raises:
        DataError: The file cannot be read, or has no conversations.
    """

    def talk(record: Any, where: str) -> list[Message]:
        if isinstance(record, dict) and "messages" in record:
            return messages_of(record, where)
        if isinstance(record, dict) and isinstance(record.get("prompt"), str):
            return said_by_user(record["prompt"])
        raise DataError(f"{where} must be an object with a text under prompt, or messages")

    return _each(path, talk, said_by_user)


def _each(
    path: Path, of_record: Callable[[Any, str], Item], of_line: Callable[[str], Item]
) -> list[Item]:
    """Reads each record of a file of JSON lines, or each line of another file."""
    if path.suffix in JSON_LINES:
        records = enumerate(_records(path), 1)
        prompts = [of_record(record, f"{path}: record {number}") for number, record in records]
    else:
        prompts = [of_line(line) for line in _lines(path) if line.strip()]
    if not prompts:
        raise DataError(f"{path}: has no prompts: write one per line")
    return prompts


def said_by_user(text: str) -> list[Message]:
    """Returns a conversation that a user begins."""
    return [{"role": USER, "content": text}]


def said_by_system(text: str, messages: list[Message]) -> list[Message]:
    """Returns a conversation with a message of the system before it."""
    return [{"role": SYSTEM, "content": text}, *messages]


def chat_prompts(
    folder: Path, conversations: Sequence[Sequence[Message]]
) -> tuple[list[str], frozenset[int]]:
    """Renders conversations with the template of the checkpoint `folder`.

    Returns:
        The text of each, in which special tokens are spelled out; ids of tokens that end an answer.

    Raises:
        DataError: There is no template, or it refuses a conversation.
    """
    tokenizer = load_tokenizer(folder, read_manifest(folder))
    with stored_chat(folder) as template:
        texts = [template.prompt(messages) for messages in conversations]
        return texts, frozenset({tokenizer.eos_id, *stop_ids(template, tokenizer)})


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
