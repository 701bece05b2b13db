"""chat.json in token folders and run directories: the template with which a model was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pydantic import Field, ValidationError

from gridformer.config import Config
from gridformer.data.chat.template import ChatTemplate
from gridformer.utils.errors import DataError
from gridformer.utils.files import UnreadableError, read_json

CHAT_FILE: Final = "chat.json"


class StoredChat(Config):
    """The content of chat.json.

    Attributes:
        template: The template.
        special: The special tokens that it may write, by name.
        origin: Where it comes from.
    """

    template: str
    special: dict[str, str] = Field(default_factory=dict)
    origin: str

    def open(self) -> ChatTemplate:
        """Starts the process that renders the template."""
        return ChatTemplate(self.template, self.special, self.origin)


def write_chat(folder: Path, chat: StoredChat) -> None:
    """Writes chat.json into a folder."""
    (folder / CHAT_FILE).write_text(chat.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read_chat(folder: Path) -> StoredChat:
    """Reads chat.json of a folder.

    Raises:
        DataError: It is missing or damaged.
    """
    file = folder / CHAT_FILE
    try:
        return StoredChat.model_validate(read_json(file))
    except (UnreadableError, ValidationError) as error:
        reason = str(error) if isinstance(error, UnreadableError) else "it is damaged"
        raise DataError(
            f"{file}: no chat template can be read ({reason}); `gridformer prepare --chat` writes "
            f"one, which a run of data.task=chat keeps"
        ) from None
