"""Megatron-LM's files of tokens, PREFIX.bin and PREFIX.idx: the index is read and written here.

The .bin file holds the token ids of one sequence after the other. `gridformer prepare` writes every
document as one sequence. Megatron's own preprocessing does the same, or writes each sentence as
one; a document is then several sequences.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gridformer.data.tokensplit import BLOCK, DocumentStarts, blocks
from gridformer.utils.errors import DataError

MAGIC: Final = b"MMIDIDX\x00\x00"
VERSION: Final = 1
# After the letters and the header follow, without gaps: the tokens of each sequence, int32; the
# byte of the .bin file at which each begins, int64; the first sequence of each document, and the
# number of sequences, int64; and, only in files with several kinds of tokens, modes, int8.
_HEADER: Final = struct.Struct("<QBQQ")  # version, dtype, sequences, document borders
HEADER_BYTES: Final = len(MAGIC) + _HEADER.size
# The codes of dtypes; 6 and 7 are float64 and float32, in which no token ids are written.
DTYPES: Final = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS: Final = {6: "float64", 7: "float32"}
_CODES: Final = {np.dtype(name): code for code, name in DTYPES.items()}
_LENGTH, _POINTER = np.dtype("<i4"), np.dtype("<i8")
LONGEST_DOCUMENT: Final = 2**31 - 1  # tokens, which the format counts in 32 bits


@dataclass(frozen=True)
class Indexed:
    """An open .idx file, memory-mapped.

    Attributes:
        dtype: The dtype of the token file.
        lengths: The tokens of each sequence [S] int32.
        pointers: The byte of the token file at which each begins [S] int64.
        documents: The first sequence of each document, and S [D] int64.
    """

    path: Path
    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]
    pointers: NDArray[np.int64]
    documents: NDArray[np.int64]

    @property
    def n_tokens(self) -> int:
        """The tokens of the token file."""
        end = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize
        return end // self.dtype.itemsize

    @property
    def n_documents(self) -> int:
        """The documents of the file, those without tokens included."""
        return len(self.documents) - 1

    def starts(self) -> DocumentStarts:
        """Returns where documents begin. Documents without tokens are left out."""
        documents = self.documents
        if self._check_documents():
            kept = np.flatnonzero(np.diff(documents) > 0)
            documents = np.append(documents[kept], documents[-1])
        n = len(self.pointers)

        def at(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
            sequences = np.asarray(documents[numbers], dtype=np.int64)
            begins = np.asarray(self.pointers[np.minimum(sequences, n - 1)])
            return np.where(sequences < n, begins // self.dtype.itemsize, self.n_tokens)

        return DocumentStarts(len(documents) - 1, at)

    @classmethod
    def open(cls, path: Path) -> Indexed:
        """Opens an .idx file and compares its size with what it says of itself."""
        if not path.is_file():
            raise DataError(f"{path}: is missing, and without it {path.stem}.bin cannot be read")
        with path.open("rb") as file:
            start = file.read(HEADER_BYTES)
        if start[: len(MAGIC)] != MAGIC:
            raise DataError(
                f"{path}: is not an index of Megatron-LM, because it does not begin with MMIDIDX; "
                f"older formats are not read, so write it again with Megatron-LM's preprocess_data"
            )
        if len(start) < HEADER_BYTES:
            raise DataError(f"{path}: ends within its first {HEADER_BYTES} bytes: it is damaged")
        version, code, sequences, borders = _HEADER.unpack(start[len(MAGIC) :])
        if version != VERSION:
            raise DataError(f"{path}: has version {version}; only version {VERSION} is read")
        if code not in DTYPES:
            what = _FLOATS.get(code, f"the unknown dtype {code}")
            raise DataError(f"{path}: describes tokens of {what}; tokens are whole numbers")
        if sequences < 1 or borders < 2:
            raise DataError(f"{path}: has no documents")
        size, n_bytes = _bytes_of(sequences, borders), path.stat().st_size
        if n_bytes not in (size, size + sequences):
            raise DataError(
                f"{path}: has {n_bytes} bytes, expected {size} for its {sequences} sequences and "
                f"{borders} document borders: it is damaged"
            )
        at = HEADER_BYTES
        lengths: NDArray[np.int32] = np.memmap(path, _LENGTH, "r", at, (sequences,))
        at += sequences * _LENGTH.itemsize
        pointers: NDArray[np.int64] = np.memmap(path, _POINTER, "r", at, (sequences,))
        at += sequences * _POINTER.itemsize
        documents: NDArray[np.int64] = np.memmap(path, _POINTER, "r", at, (borders,))
        if pointers[0] != 0 or documents[0] != 0 or documents[-1] != sequences:
            raise DataError(
                f"{path}: its sequences begin at byte {pointers[0]}, and its documents run from "
                f"sequence {documents[0]} to {documents[-1]} of {sequences}: it is damaged"
            )
        return cls(path, np.dtype(DTYPES[code]), lengths, pointers, documents)

    def check(self) -> None:
        """Reads the whole index: sequences follow one another, and documents are in order."""
        for some in blocks(len(self.lengths)):
            lengths = self.lengths[some].astype(np.int64)
            steps = np.diff(self.pointers[some])
            wrong = (steps != lengths[: len(steps)] * self.dtype.itemsize) | (steps < 0)
            if wrong.any():
                number = some.start + int(wrong.argmax())
                raise DataError(
                    f"{self.path}: sequence {number} begins at byte {self.pointers[number]} and "
                    f"has {self.lengths[number]} tokens of {self.dtype.name}, but the next begins "
                    f"at byte {self.pointers[number + 1]}: it is damaged"
                )
        self._check_documents()

    def _check_documents(self) -> bool:
        """Checks the order of documents, and returns whether some have no tokens."""
        empty = False
        for some in blocks(self.n_documents):
            steps = np.diff(self.documents[some])
            empty = empty or bool((steps == 0).any())
            if (steps < 0).any():
                number = some.start + int((steps < 0).argmax())
                raise DataError(
                    f"{self.path}: document {number} begins after the next one: it is damaged"
                )
        return empty


def index_bytes(documents: int) -> int:
    """Returns the size of an index in which every document is one sequence."""
    return _bytes_of(documents, documents + 1)


def write_index(path: Path, dtype: np.dtype[Any], lengths: NDArray[np.integer[Any]]) -> None:
    """Writes the index of a token file in which every document is one sequence.

    Args:
        lengths: The tokens of each document [n_documents]. It may be memory-mapped, since a
            million are read at a time.
    """
    n = len(lengths)

    def each() -> Iterator[NDArray[np.int64]]:
        for begin in range(0, n, BLOCK):
            yield np.asarray(lengths[begin : begin + BLOCK], dtype=np.int64)

    with path.open("wb") as file:
        file.write(MAGIC + _HEADER.pack(VERSION, _CODES[dtype.newbyteorder("<")], n, n + 1))
        for block in each():
            file.write(block.astype(_LENGTH).tobytes())
        at = 0
        for block in each():
            ends = at + np.cumsum(block) * dtype.itemsize
            file.write((ends - block * dtype.itemsize).astype(_POINTER).tobytes())
            at = int(ends[-1])
        for begin in range(0, n + 1, BLOCK):
            file.write(np.arange(begin, min(begin + BLOCK, n + 1), dtype=_POINTER).tobytes())


def _bytes_of(sequences: int, borders: int) -> int:
    each = _LENGTH.itemsize + _POINTER.itemsize
    return HEADER_BYTES + sequences * each + borders * _POINTER.itemsize
