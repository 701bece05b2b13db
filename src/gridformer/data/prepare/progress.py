"""The progress of a preparation, for display."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PrepareProgress:
    """The progress of a preparation.

    Attributes:
        phase: What it does now.
        bytes: The bytes of text that are tokenized.
        tokens: The tokens that are written.
        documents: The documents that are written.
        total: The bytes of all sources, or None if they are not known.
        kept: The documents that were written already when a preparation that had been stopped went
            on.
    """

    phase: Literal["sampling", "training the tokenizer", "tokenizing"]
    bytes: int = 0
    tokens: int = 0
    documents: int = 0
    total: int | None = None
    kept: int = 0
