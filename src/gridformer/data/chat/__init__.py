"""Conversations as text for a model: templates, records, and which tokens are answers."""

from gridformer.data.chat.encoding import Encoded, encode, stop_ids
from gridformer.data.chat.messages import Message, messages_of
from gridformer.data.chat.stored import CHAT_FILE, StoredChat, read_chat, write_chat
from gridformer.data.chat.template import ChatTemplate
from gridformer.data.chat.templates import open_template

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
