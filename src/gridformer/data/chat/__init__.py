"""Conversations as text for a model: templates, records, and which tokens are answers."""

from gridformer.data.chat.conversations import Encoded, encode, messages_of, stop_ids
from gridformer.data.chat.template import (
    CHAT_FILE,
    ChatTemplate,
    Message,
    StoredChat,
    open_template,
    read_chat,
    write_chat,
)

__all__ = [
    "CHAT_FILE",
    "ChatTemplate",
    "Encoded",
    "Message",
    "StoredChat",
    "encode",
    "messages_of",
    "open_template",
    "read_chat",
    "stop_ids",
    "write_chat",
]
