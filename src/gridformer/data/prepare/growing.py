"""The files of one split while documents are appended to it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from gridformer.data.columns import Column
from gridformer.data.indexed import LONGEST_DOCUMENT, write_index
from gridformer.data.tokenfolder import (
    SplitEntry,
    SplitName,
    bin_name,
    borders_name,
    column_name,
)
from gridformer.utils.errors import DataError

_COPY_TOKENS = 1 << 22  # tokens to copy at a time when documents move to the other split
_LENGTH = np.dtype("<i8")


class Growing:
    """The token file of a split, the lengths of its documents, and its columns.

    Args:
        folder: The folder.
        split: The name of the split.
        dtype: The dtype of the token file.
        columns: The columns by name.
        sizes: The bytes to keep of files that are there already, by name.
    """

    def __init__(
        self,
        folder: Path,
        split: SplitName,
        dtype: np.dtype[Any],
        columns: Mapping[str, Column],
        sizes: Mapping[str, int],
    ) -> None:
        self.dtype = dtype
        self.columns = columns
        self.path = folder / bin_name(split)
        self.index_path = folder / borders_name(split)
        self.lengths_path = folder / f"{split}.lengths"  # only until the index is written
        self.column_paths = {name: folder / column_name(split, name) for name in columns}
        self.tokens = sizes.get(self.path.name, 0) // dtype.itemsize
        self._begun = 0  # tokens of the document that has not ended
        self._files: dict[Path, IO[bytes]] = {
            path: _opened(path, sizes.get(path.name, 0))
            for path in (self.path, self.lengths_path, *self.column_paths.values())
        }

    def synced(self) -> dict[str, int]:
        """Returns the bytes of each file by name, after waiting until they are on disk."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        return {path.name: file.tell() for path, file in self._files.items()}

    def write(self, ids: Sequence[int] | NDArray[Any], rows: Mapping[str, NDArray[Any]]) -> None:
        """Appends tokens of the current document, and rows to columns."""
        self._files[self.path].write(np.asarray(ids, dtype=self.dtype).tobytes())
        for name, values in rows.items():
            self._files[self.column_paths[name]].write(values.tobytes())
        self.tokens += len(ids)
        self._begun += len(ids)

    def end_document(self) -> None:
        """Ends the current document.

        Raises:
            DataError: It is longer than the format can say.
        """
        if self._begun > LONGEST_DOCUMENT:
            raise DataError(
                f"a document has {self._begun:,} tokens; at most {LONGEST_DOCUMENT:,} fit: divide "
                f"its file into several"
            )
        self._files[self.lengths_path].write(np.array([self._begun], dtype=_LENGTH).tobytes())
        self._begun = 0

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def lengths(self) -> NDArray[np.int64]:
        """The tokens of each document [n_documents], memory-mapped."""
        if not self.lengths_path.stat().st_size:
            return np.zeros(0, dtype=np.int64)
        return np.memmap(self.lengths_path, dtype=_LENGTH, mode="r")

    def write_lengths(self, lengths: Sequence[int] | NDArray[np.int64]) -> None:
        """Replaces the lengths of the documents by others, in tokens, as [n_documents]."""
        self.lengths_path.write_bytes(np.asarray(lengths, dtype=_LENGTH).tobytes())

    def column(self, name: str) -> NDArray[Any]:
        """The rows of a column [n] or [n, width], read whole."""
        column = self.columns[name]
        rows = np.fromfile(self.column_paths[name], dtype=column.item)
        return rows if column.width == 1 else rows.reshape(-1, column.width)

    def write_column(self, name: str, rows: NDArray[Any]) -> None:
        """Replaces the values of a column, one row for each document or token."""
        self.column_paths[name].write_bytes(rows.astype(self.columns[name].item).tobytes())

    def copy_documents(self, other: Growing) -> None:
        """Gives the other split, which has as many documents, the same values of documents."""
        for name, column in self.columns.items():
            if column.per == "document":
                other.write_column(name, self.column(name))

    def entry(self) -> SplitEntry:
        """Writes the index, and returns the sizes of the split."""
        lengths = self.lengths()
        write_index(self.index_path, self.dtype, lengths)
        return SplitEntry(
            tokens=self.tokens,
            documents=len(lengths),
            bin_bytes=self.path.stat().st_size,
            offsets_bytes=self.index_path.stat().st_size,
        )

    def tidy(self) -> None:
        """Removes what only the writing needed."""
        self.lengths_path.unlink()

    def per_token(self) -> dict[Path, int]:
        """The files with the same number of bytes for every token, and that number."""
        columns = {
            self.column_paths[name]: column.item_bytes
            for name, column in self.columns.items()
            if column.per == "token"
        }
        return {self.path: self.dtype.itemsize, **columns}


def _opened(path: Path, size: int) -> IO[bytes]:
    """Opens a file for appending after its first `size` bytes, without what follows them."""
    file = path.open("r+b" if size else "wb")
    file.truncate(size)
    file.seek(size)
    return file


def move_documents(source: Growing, target: Growing, share: float, unit: int) -> None:
    """Moves the `unit` documents whose length is nearest to `share` of all to an empty target.

    Args:
        source: The split that gives the documents.
        target: The split that gets them, which has none.
        share: The wanted length, as a fraction of the tokens of `source`.
        unit: How many documents belong together: 2 for pairs, otherwise 1.
    """
    lengths = np.array(source.lengths())
    units = lengths.reshape(-1, unit).sum(axis=1)
    chosen = unit * int(np.abs(units - share * source.tokens).argmin())
    moved = np.arange(chosen, chosen + unit)
    start = int(lengths[:chosen].sum())
    move(source, target, start, start + int(lengths[moved].sum()))
    source.write_lengths(np.delete(lengths, moved))
    target.write_lengths(lengths[moved])
    for name, column in source.columns.items():
        if column.per == "document":
            rows = source.column(name)
            source.write_column(name, np.delete(rows, moved, axis=0))
            target.write_column(name, rows[moved])


def move(source: Growing, target: Growing, start: int, end: int) -> None:
    """Moves tokens [start, end) to an empty target and closes the gap, but leaves lengths alone.

    Args:
        source: The split that gives the tokens.
        target: The split that gets them, which has none.
        start, end: The tokens, counted in `source`.
    """
    for (path, size), to in zip(source.per_token().items(), target.per_token(), strict=True):
        with path.open("r+b") as from_file, to.open("wb") as to_file:
            for at in range(start, end, _COPY_TOKENS):
                from_file.seek(at * size)
                to_file.write(from_file.read(min(_COPY_TOKENS, end - at) * size))
            for at in range(end, source.tokens, _COPY_TOKENS):
                from_file.seek(at * size)
                block = from_file.read(_COPY_TOKENS * size)
                from_file.seek((at - (end - start)) * size)
                from_file.write(block)
            from_file.truncate((source.tokens - (end - start)) * size)
    source.tokens -= end - start
    target.tokens += end - start
