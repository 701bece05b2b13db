"""Conversations as tokens, with the tokens of the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gridformer.data.chat.messages import ASSISTANT, USER, Message
from gridformer.data.chat.template import ChatTemplate
from gridformer.data.tokenizer import Tokenizer
from gridformer.utils.errors import DataError


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
    """Returns the special token with which answers end, if the template has one.

    Args:
        template: Renders conversations as text.
        tokenizer: Encodes the text.
    """
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
