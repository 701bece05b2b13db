"""One split of a token source, memory-mapped: tokens, where documents begin, and columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from gridformer.data.columns import LABELS
from gridformer.utils.errors import DataError


@dataclass(frozen=True)
class DocumentStarts:
    """Where documents begin, computed from a mapped file when it is needed.

    It stands for an array [n_documents + 1] int64 of starts, in tokens, and the end of the last
    document. Numbers, slices and arrays of numbers select from it as from an array;
    `numpy.asarray` reads all of it, 8 bytes per document.

    Attributes:
        n_documents: How many documents there are.
        at: Returns the starts of documents with given numbers, in [0, n_documents].
    """

    n_documents: int
    at: Callable[[NDArray[np.int64]], NDArray[np.int64]]

    def __len__(self) -> int:
        return self.n_documents + 1

    @overload
    def __getitem__(self, key: int) -> np.int64: ...
    @overload
    def __getitem__(self, key: slice | NDArray[Any]) -> NDArray[np.int64]: ...
    def __getitem__(self, key: int | slice | NDArray[Any]) -> np.int64 | NDArray[np.int64]:
        n = len(self)
        if isinstance(key, slice):
            return self.at(np.arange(*key.indices(n)))
        numbers = np.asarray(key, dtype=np.int64)
        if numbers.size and not (-n <= numbers.min() and numbers.max() < n):
            raise IndexError(f"there are starts 0 to {n - 1}, not {key}")
        found = self.at(np.where(numbers < 0, numbers + n, numbers))
        return np.int64(found) if found.ndim == 0 else found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return self[:] if dtype is None else self[:].astype(dtype)

    def some(self, first: int, n_documents: int) -> DocumentStarts:
        """Returns the starts of consecutive documents, counted from the start of the first."""
        begin = int(self[first])
        return DocumentStarts(n_documents, lambda numbers: self.at(numbers + first) - begin)


Offsets = NDArray[np.int64] | DocumentStarts


@dataclass(frozen=True)
class TokenSplit:
    """One split of a token source, memory-mapped.

    Document d is tokens[offsets[d] : offsets[d + 1]], its end-of-text token included.

    Attributes:
        name: The name of the split.
        path: Its token file.
        tokens: Token ids [n_tokens] in the file's dtype.
        offsets: Starts of documents, and the end of the last, [n_documents + 1] int64.
        vocab_size: Ids are in [0, vocab_size).
        columns: Values of documents [n_documents] or [n_documents, width], or of tokens [n_tokens]
            or [n_tokens, width], by name; see `gridformer.data.columns`.
    """

    name: str
    path: Path
    tokens: NDArray[Any]
    offsets: Offsets
    vocab_size: int
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def labels(self) -> NDArray[np.int32] | None:
        """The labels of documents [n_documents] int32; None unless the source is labeled."""
        return self.columns.get(LABELS)

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
        """Returns the token ids [length] int64 of one document.

        Raises:
            IndexError: There is no document with that number.
            DataError: The file is damaged; see `window`.
        """
        if not 0 <= number < self.n_documents:
            raise IndexError(f"{self.path} has documents 0 to {self.n_documents - 1}, not {number}")
        return self.window(int(self.offsets[number]), int(self.offsets[number + 1]))

    def window(self, start: int, end: int) -> NDArray[np.int64]:
        """Returns tokens `start` to `end` of the split, across documents: [end - start] int64.

        Raises:
            DataError: An id is outside the vocabulary, which happens only in a damaged file, or
                with another tokenizer than the one that wrote the file.
        """
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

        It is faster than as many calls of `window`, and it does not hold Python's lock while it
        copies.

        Raises:
            DataError: The file is damaged; see `window`.
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
