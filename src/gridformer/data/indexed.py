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
_BLOCK = 1 << 20  # documents, or sequences of tokens, that are read at a time


@dataclass(frozen=True)
class Borders:
    """Where the documents of a token file begin, read from a mapped file when it is needed."""

    path: Path
    n_documents: int

    def at(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the first tokens of documents; one after the last begins where that ends."""
        raise NotImplementedError

    def starts(self, first: int = 0, end: int | None = None) -> NDArray[np.int64]:
        """Returns the starts of documents [first, end), and the end of the last of them.

        They are counted from the start of the first one.
        """
        starts = self.at(np.arange(first, (self.n_documents if end is None else end) + 1))
        return starts - starts[0]

    def check(self) -> None:
        """Checks that each document starts after the one before, so that none is empty."""
        for some in _blocks(self.n_documents):
            starts = self.at(np.arange(some.start, min(some.stop, self.n_documents + 1)))
            wrong = starts[1:] <= starts[:-1]
            if wrong.any():
                number = int(wrong.argmax())
                raise DataError(
                    f"{self.path}: document {some.start + number} runs from token "
                    f"{starts[number]} to {starts[number + 1]}, so the file is damaged"
                )


@dataclass(frozen=True)
class Indexed(Borders):
    """An open .idx file, memory-mapped."""

    dtype: np.dtype[Any]  # of the token file
    lengths: NDArray[np.int32]  # tokens of each sequence [S]
    pointers: NDArray[np.int64]  # the byte of the token file at which each begins [S]
    documents: NDArray[np.int64]  # the first sequence of each document with tokens, and S [D + 1]

    @property
    def n_tokens(self) -> int:
        """The tokens of the token file."""
        end = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize
        return end // self.dtype.itemsize

    def at(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        sequences, n = np.asarray(self.documents[numbers], dtype=np.int64), len(self.pointers)
        begins = np.asarray(self.pointers[np.minimum(sequences, n - 1)])
        return np.where(sequences < n, begins // self.dtype.itemsize, self.n_tokens)

    @classmethod
    def open(cls, path: Path) -> Indexed:
        """Opens an .idx file, and checks its size and the order of its documents."""
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
        fewest = 1  # sequences of a document
        for some in _blocks(borders - 1):
            steps = np.diff(documents[some])
            fewest = min(fewest, int(steps.min()))
            if fewest < 0:
                number = some.start + int((steps < 0).argmax())
                raise DataError(
                    f"{path}: document {number} begins after the next one: it is damaged"
                )
        if fewest == 0:
            documents = np.append(documents[:-1][np.diff(documents) > 0], sequences)
        dtype = np.dtype(DTYPES[code])
        return cls(path, len(documents) - 1, dtype, lengths, pointers, documents)

    def check(self) -> None:
        """Reads the whole index: sequences follow one another, and documents have tokens."""
        for some in _blocks(len(self.lengths)):
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
        super().check()


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
    blocks = [slice(begin, begin + _BLOCK) for begin in range(0, n, _BLOCK)]
    with path.open("wb") as file:
        file.write(MAGIC + _HEADER.pack(VERSION, _CODES[dtype.newbyteorder("<")], n, n + 1))
        for some in blocks:
            file.write(np.asarray(lengths[some], dtype=_LENGTH).tobytes())
        at = 0
        for some in blocks:
            sizes = np.asarray(lengths[some], dtype=np.int64) * dtype.itemsize
            ends = at + np.cumsum(sizes)
            file.write((ends - sizes).astype(_POINTER).tobytes())
            at = int(ends[-1])
        for begin in range(0, n + 1, _BLOCK):
            file.write(np.arange(begin, min(begin + _BLOCK, n + 1), dtype=_POINTER).tobytes())


def _bytes_of(sequences: int, borders: int) -> int:
    each = _LENGTH.itemsize + _POINTER.itemsize
    return HEADER_BYTES + sequences * each + borders * _POINTER.itemsize


def _blocks(n: int) -> Iterator[slice]:
    """Yields slices of n values and the value after each slice, a million at a time."""
    for begin in range(0, n, _BLOCK):
        yield slice(begin, begin + _BLOCK + 1)
