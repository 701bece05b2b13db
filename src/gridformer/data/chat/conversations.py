"""Conversations: read from records, and as tokens with the tokens of the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gridformer.data.chat.template import ASSISTANT, SYSTEM, USER, ChatTemplate, Message
from gridformer.data.tokenizer import Tokenizer
from gridformer.utils.errors import DataError

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


@dataclass(frozen=True)
class Encoded:
    """A conversation as tokens.

    Attributes:
        ids: Its tokens.
        answer: For each token whether it belongs to an answer.
    """

    ids: list[int]
    answer: list[bool]


def encode(
    conversations: Sequence[Sequence[Message]], template: ChatTemplate, tokenizer: Tokenizer
) -> list[Encoded]:
    """Returns conversations as tokens, as transformers' `apply_chat_template` does.

    A token belongs to an answer if one of its characters does.

    Args:
        conversations: The messages of each conversation.
        template: Renders them as text.
        tokenizer: Encodes the text, in which special tokens are spelled out.

    Raises:
        DataError: The template refuses a conversation.
    """
    rendered = [template.render(messages) for messages in conversations]
    found = []
    for one, (ids, spans) in zip(rendered, tokenizer.encode_marked([r.text for r in rendered])):
        answer = [False] * len(ids)
        place = 0
        for begin, end in one.answers:
            while place < len(ids) and spans[place][1] <= begin:
                place += 1
            while place < len(ids) and spans[place][0] < end:
                answer[place] = True
                place += 1
        found.append(Encoded(ids, answer))
    return found


def stop_ids(template: ChatTemplate, tokenizer: Tokenizer) -> list[int]:
    """Returns the special token with which answers end, if the template has one."""
    talk = [{"role": USER, "content": "a"}, {"role": ASSISTANT, "content": "b"}]
    try:
        (found,) = encode([talk], template, tokenizer)
    except DataError:  # a template that needs more, or does not tell where answers are
        return []
    said = [number for number, is_said in zip(found.ids, found.answer) if is_said]
    return [number for number in said if number in tokenizer.special_ids][-1:]


def spells_special(messages: Sequence[Message], tokenizer: Tokenizer) -> bool:
    """Returns whether a message contains a special token as text, which could forge a turn."""
    special = tokenizer.special_tokens
    return any(name in m["content"] for m in messages for name in special)


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
