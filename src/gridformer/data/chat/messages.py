"""Conversations in records: messages with roles, instructions with outputs, or prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gridformer.utils.errors import DataError

Message = dict[str, Any]  # "role" and "content", and what else a template may read
USER, ASSISTANT, SYSTEM = "user", "assistant", "system"
# The keys by which a record is recognized, in the order in which they are looked for.
FORMS = (("messages",), ("instruction", "output"), ("prompt", "completion"))


def messages_of(record: Mapping[str, Any], where: str) -> list[Message]:
    """Returns the conversation of a record.

    It is one of {"messages": [{"role", "content"}, ...]}, {"instruction", "input", "output"} and
    {"prompt", "completion"}, where the last two values are texts or lists of messages. A text under
    "system" comes first in the latter two.

    Args:
        record: The record.
        where: Its file and place, for errors.

    Raises:
        DataError: It is none of them, or a value has the wrong type.
    """
    form = next((keys for keys in FORMS if all(key in record for key in keys)), None)
    if form is None:
        raise DataError(
            f"{where}: is not a conversation; a record has messages, or instruction and output, or "
            f"prompt and completion, and this one has {', '.join(sorted(record)) or 'no keys'}"
        )
    if form == ("messages",):
        return _messages(record["messages"], where, "messages")
    found = [_message(SYSTEM, record["system"], where, "system")] if record.get("system") else []
    if form == ("prompt", "completion"):
        for key, role in zip(form, (USER, ASSISTANT)):
            value = record[key]
            if isinstance(value, list):
                found += _messages(value, where, key)
            else:
                found.append(_message(role, value, where, key))
        return found
    asked = _message(USER, record["instruction"], where, "instruction")
    if record.get("input"):
        more = _message(USER, record["input"], where, "input")
        asked["content"] += "\n\n" + more["content"]
    return [*found, asked, _message(ASSISTANT, record["output"], where, "output")]


def has_answer(messages: list[Message]) -> bool:
    """Returns whether a conversation has anything for a model to learn to say."""
    return any(m["role"] == ASSISTANT and m["content"].strip() for m in messages)


def _messages(value: object, where: str, key: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: '{key}' is not a list of messages")
    found = []
    for number, message in enumerate(value):
        at = f"{key}[{number}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{where}: {at} is not an object with the keys role and content")
        found.append({**message, **_message(message["role"], message.get("content"), where, at)})
    return found


def _message(role: str, content: object, where: str, key: str) -> Message:
    if not isinstance(content, str):
        raise DataError(f"{where}: the content of '{key}' is {type(content).__name__}, not text")
    return {"role": role, "content": content}
