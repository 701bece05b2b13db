"""One split of a token source, memory-mapped: tokens, where documents begin, and columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gridformer.config import Config
from gridformer.utils.errors import DataError

ColumnDtype = Literal["uint8", "int8", "uint16", "int16", "int32", "int64", "float32"]
LABELS = "labels"


class Column(Config):
    """What one column of a token folder holds."""

    per: Literal["document", "token"] = "document"
    dtype: ColumnDtype
    width: int = Field(default=1, ge=1, description="values of each document or token")

    @property
    def item(self) -> np.dtype[Any]:
        """The dtype of one value in the file, little-endian."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def item_bytes(self) -> int:
        """The bytes of all values of one document or token."""
        return self.item.itemsize * self.width

    def rows(self, values: object, number: int) -> NDArray[Any]:
        """Returns values as an array [number, width] of the column's dtype."""
        given = np.asarray(values)
        if given.size != number * self.width:
            raise ValueError(f"{given.size} values, but {number} times {self.width} are needed")
        rows = given.reshape(number, self.width).astype(self.item)
        if self.dtype != "float32" and not np.array_equal(rows, given.reshape(rows.shape)):
            raise ValueError(f"values {given.min()} to {given.max()} do not fit {self.dtype}")
        return rows


LABEL_COLUMN = Column(dtype="int32")


@dataclass(frozen=True)
class TokenSplit:
    """One split of a token source, memory-mapped.

    Document d is tokens[offsets[d] : offsets[d + 1]], its end-of-text token included.
    """

    name: str
    path: Path
    tokens: NDArray[Any]  # ids [n_tokens] in the file's dtype
    # Starts of documents, and the end of the last, [n_documents + 1], or what reads them.
    starts: NDArray[np.int64] | Callable[[], NDArray[np.int64]]
    vocab_size: int  # ids are in [0, vocab_size)
    # By name: of documents [n_documents] or [n_documents, width], or of tokens alike.
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """Starts of documents, and the end of the last. Windows of running text need none."""
        return self.starts() if callable(self.starts) else self.starts

    @property
    def n_tokens(self) -> int:
        """The tokens of the token file, those that end documents included."""
        return len(self.tokens)

    @property
    def n_documents(self) -> int:
        return len(self.offsets) - 1

    def document_length(self, number: int) -> int:
        """Returns the number of tokens of a document, its end-of-text token included."""
        return int(self.offsets[number + 1] - self.offsets[number])

    def document(self, number: int) -> NDArray[np.int64]:
        """Returns the token ids [length] int64 of one document."""
        if not 0 <= number < self.n_documents:
            raise IndexError(f"{self.path} has documents 0 to {self.n_documents - 1}, not {number}")
        return self.window(int(self.offsets[number]), int(self.offsets[number + 1]))

    def window(self, start: int, end: int) -> NDArray[np.int64]:
        """Returns tokens `start` to `end` of the split, across documents: [end - start] int64."""
        ids = self.tokens[start:end].astype(np.int64)
        if ids.size and (wrong := self._outside(ids)) is not None:
            raise DataError(
                f"{self.path}: contains token {wrong} outside the vocabulary of "
                f"{self.vocab_size}: the file is damaged or was written with another tokenizer, so "
                f"prepare the folder again"
            )
        return ids

    def windows(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Returns `length` tokens from each of `starts` on, [len(starts), length] int64.

        It is faster than as many calls of `window`, and does not hold Python's lock meanwhile.
        """
        every = np.lib.stride_tricks.sliding_window_view(np.asarray(self.tokens), length)
        ids = every[starts].astype(np.int64)
        if ids.size and self._outside(ids) is not None:
            damaged = int(starts[(ids.view(np.uint64) >= self.vocab_size).any(axis=1).argmax()])
            self.window(damaged, damaged + length)  # raises
        return ids

    def _outside(self, ids: NDArray[np.int64]) -> int | None:
        """Returns an id outside the vocabulary, if there is one. Ids below 0 count as large."""
        largest = ids.view(np.uint64).max()
        return int(largest.astype(np.int64)) if largest >= self.vocab_size else None
