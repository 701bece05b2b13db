"""Prompts of conversations, rendered by the template with which a model was trained."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gridformer.checkpoint.manifest import KEPT, read_manifest
from gridformer.checkpoint.side_files import load_tokenizer, root_of
from gridformer.data.chat import (
    CHAT_FILE,
    Message,
    StoredChat,
    open_template,
    read_chat,
    stop_ids,
)
from gridformer.utils.errors import DataError, UserError


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
    with stored_chat(folder).open() as template:
        texts = [template.prompt(messages) for messages in conversations]
        stops = frozenset({tokenizer.eos_id, *stop_ids(template, tokenizer)})
    shown = [messages[-1]["content"] for messages in conversations]
    return ChatPrompts(tuple(texts), tuple(shown), stops)


def stored_chat(folder: Path) -> StoredChat:
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
