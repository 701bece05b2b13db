"""Token folders, which `gridformer prepare` writes and training reads memory-mapped.

    index.json           describes the folder; written last, and without it the folder does not open
    tokenizer.json       the tokenizer, in the format of the tokenizers library
    train.bin            token ids, little-endian uint16 (uint32 past 65536 tokens), documents one
                         after the other, each followed by the end-of-text token
    train.offsets.bin    little-endian int64: the start of each document, and the end of the last
    train.labels.bin     in labeled folders: little-endian int32, the label of each document
    val.bin, val.offsets.bin, val.labels.bin

A corpus of a single document is split in two; only then train.bin does not end with the end-of-text
token. In a folder of pairs, documents 2i and 2i + 1 of a split are the two texts of pair i.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, Self, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from gridformer.config import Config
from gridformer.data.tokenizer import Tokenizer
from gridformer.utils.errors import DataError
from gridformer.utils.files import UnreadableError, exists, read_json

FORMAT: Final = "gridformer-tokens"
VERSION: Final = 2
INDEX = "index.json"
TOKENIZER = "tokenizer.json"
OFFSET_DTYPE = np.dtype("<i8")
LABEL_DTYPE = np.dtype("<i4")
_AT_A_TIME = 1 << 20  # documents that are compared at a time
Kind = Literal["text", "pairs", "labeled"]
SplitName = Literal["train", "val"]
SPLITS: tuple[SplitName, ...] = ("train", "val")


def bin_name(split: SplitName) -> str:
    return f"{split}.bin"


def offsets_name(split: SplitName) -> str:
    return f"{split}.offsets.bin"


def labels_name(split: SplitName) -> str:
    return f"{split}.labels.bin"


_SPLIT_FILES = (bin_name, offsets_name, labels_name)
FILES = frozenset({INDEX, TOKENIZER, *(name(split) for split in SPLITS for name in _SPLIT_FILES)})


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Returns the dtype of a token file: uint16 if every id of the vocabulary fits, else uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class SplitEntry(Config):
    """The size of one split: its tokens and documents, and the bytes of its two files."""

    tokens: int = Field(ge=1)
    documents: int = Field(ge=1)
    bin_bytes: int = Field(ge=1)
    offsets_bytes: int = Field(ge=1)


class PartEntry(Config):
    """A part of a source that may have its own license, such as one catalog of messages."""

    name: str
    license: str | None
    documents: int


class SourceEntry(Config):
    """One SOURCE of `gridformer prepare`: what was read from it, and its license if known."""

    source: str
    license: str | None
    documents: int
    bytes: int = Field(description="of UTF-8 text")
    parts: tuple[PartEntry, ...] = ()


class TokenizerEntry(Config):
    """The origin of the tokenizer, and the size of its file in bytes."""

    origin: str
    bytes: int


class Index(Config):
    """The content of index.json.

    Version 1 had neither kinds nor parts; its folders contain plain text.
    """

    format: Literal["gridformer-tokens"] = FORMAT
    version: Literal[1, 2] = VERSION
    kind: Kind = "text"
    languages: tuple[str, str] | None = Field(
        default=None, description="the languages of a pair's two texts"
    )
    labels: tuple[str, ...] = Field(default=(), description="the name of each label number")
    dtype: Literal["uint16", "uint32"]
    vocab_size: int = Field(ge=1)
    eos_token: str
    eos_id: int = Field(ge=0)
    seed: int = Field(ge=-(2**63), lt=2**64)
    val_fraction: float
    train: SplitEntry
    val: SplitEntry
    tokenizer: TokenizerEntry
    sources: tuple[SourceEntry, ...]
    skipped: dict[str, int]


@dataclass(frozen=True)
class TokenSplit:
    """One split of a token folder, memory-mapped.

    Document d is tokens[offsets[d] : offsets[d + 1]], its end-of-text token included.

    Attributes:
        name: The name of the split.
        path: Its token file.
        tokens: Token ids [n_tokens] in the folder's dtype.
        offsets: Starts of documents, and the end of the last, [n_documents + 1] int64.
        vocab_size: Ids are in [0, vocab_size).
        labels: The labels of documents [n_documents] int32; None unless the folder is labeled.
    """

    name: str
    path: Path
    tokens: NDArray[Any]
    offsets: NDArray[np.int64]
    vocab_size: int
    labels: NDArray[np.int32] | None = None

    @property
    def n_tokens(self) -> int:
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
            DataError: An id is outside the vocabulary, which happens only in a damaged file.
        """
        ids = self.tokens[start:end].astype(np.int64)
        if ids.size and (largest := int(ids.max())) >= self.vocab_size:
            raise DataError(
                f"{self.path}: contains token {largest} outside the vocabulary of "
                f"{self.vocab_size}: the file is damaged, so prepare the folder again"
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
        ids = every[starts]
        if ids.size and int(ids.max()) >= self.vocab_size:
            damaged = int(starts[(ids >= self.vocab_size).any(axis=1).argmax()])
            self.window(damaged, damaged + length)  # raises
        return ids.astype(np.int64)


@dataclass(frozen=True)
class TokenFolder:
    """An open token folder, whose token files are memory-mapped.

    Attributes:
        path: The folder.
        index: The content of its index.json.
        train: The training split.
        val: The validation split.
    """

    path: Path
    index: Index
    train: TokenSplit
    val: TokenSplit

    @property
    def kind(self) -> Kind:
        return self.index.kind

    @property
    def vocab_size(self) -> int:
        return self.index.vocab_size

    @property
    def eos_id(self) -> int:
        return self.index.eos_id

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer.

        Raises:
            DataError: It is damaged, or not the one that wrote the folder's tokens.
        """
        tokenizer = Tokenizer.load(self.path / TOKENIZER)
        found = (tokenizer.vocab_size, tokenizer.eos_id)
        if found != (self.vocab_size, self.eos_id):
            raise DataError(
                f"{self.path / TOKENIZER}: has vocabulary and end-of-text id {found}, but {INDEX} "
                f"says {(self.vocab_size, self.eos_id)}: it was replaced, so prepare the folder "
                f"again"
            )
        return tokenizer

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Opens a folder after comparing every file with the index.

        Raises:
            DataError: The folder is missing, is not a token folder, is truncated, or contradicts
                itself. The message names the file and what was expected of it.
        """
        path = Path(path)
        index = read_index(path)
        dtype = token_dtype(index.vocab_size)
        if dtype.name != index.dtype:
            raise DataError(
                f"{path / INDEX}: says {index.dtype}, but a vocabulary of {index.vocab_size} is "
                f"written as {dtype.name}: {_again(path)}"
            )
        if index.eos_id >= index.vocab_size:
            raise DataError(
                f"{path / INDEX}: end-of-text id {index.eos_id} is outside the vocabulary of "
                f"{index.vocab_size}: {_again(path)}"
            )
        _check_size(path / TOKENIZER, index.tokenizer.bytes, f"as {INDEX} says")
        train, val = (_open_split(path, name, index, dtype) for name in SPLITS)
        return cls(path, index, train, val)

    def check(self) -> None:
        """Reads what `open` does not: the tokenizer, and where every document begins.

        A launcher calls this before it starts processes, so that none of them finds it out.

        Raises:
            DataError: The tokenizer is damaged, or the documents of a split do not follow one
                another.
        """
        for split in (self.train, self.val):
            _check_offsets(self.path, split)
        self.tokenizer  # noqa: B018 (reading it is the check)


def is_token_folder(path: Path) -> bool:
    """Returns whether a folder has a token folder's index, in any version and even if damaged."""
    try:
        raw = read_json(path / INDEX)
    except UnreadableError:
        return False
    return isinstance(raw, dict) and raw.get("format") == FORMAT


def read_index(path: Path) -> Index:
    """Reads the index of a token folder.

    Raises:
        DataError: The folder or its index is missing, damaged, or of another format or version.
    """
    if not exists(path):
        raise DataError(
            f"{path}: no such token folder; write one, for instance from Python's own sources: "
            f"gridformer prepare python-stdlib --out {path}"
        )
    file = path / INDEX
    if not exists(file):
        raise DataError(
            f"{path}: is not a token folder, because it has no {INDEX}; write one with "
            f"gridformer prepare SOURCE --out FOLDER"
        )
    try:
        raw = read_json(file)
    except UnreadableError as error:
        raise DataError(f"{error}: {_again(path)}") from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise DataError(
            f'{file}: is not the index of a token folder ("format" is not "{FORMAT}"); write one '
            f"with gridformer prepare SOURCE --out FOLDER"
        )
    if raw.get("version") not in (1, VERSION):
        raise DataError(
            f"{file}: has version {raw.get('version')} of the format, but this gridformer reads "
            f"versions 1 and {VERSION}: {_again(path)}"
        )
    try:
        return Index.model_validate(raw)
    except ValidationError as error:
        where = {".".join(str(part) for part in e["loc"]): e["msg"].lower() for e in error.errors()}
        problems = "; ".join(f"{key}: {message}" for key, message in where.items())
        raise DataError(f"{file}: is damaged ({problems}): {_again(path)}") from None


def _open_split(path: Path, name: SplitName, index: Index, dtype: np.dtype[Any]) -> TokenSplit:
    entry = index.train if name == "train" else index.val
    tokens_file, offsets_file = path / bin_name(name), path / offsets_name(name)
    ids, starts = f"{entry.tokens} tokens of {dtype.name}", f"{entry.documents + 1} int64 offsets"
    bin_bytes = entry.tokens * dtype.itemsize
    offsets_bytes = (entry.documents + 1) * OFFSET_DTYPE.itemsize
    for file, recorded, expected, why in (
        (tokens_file, entry.bin_bytes, bin_bytes, ids),
        (offsets_file, entry.offsets_bytes, offsets_bytes, starts),
    ):
        if recorded != expected:
            raise DataError(
                f"{path / INDEX}: gives {file.name} {recorded} bytes, but {why} take {expected}: "
                f"{_again(path)}"
            )
        _check_size(file, expected, why)
    tokens = np.memmap(tokens_file, dtype=dtype, mode="r")
    offsets = np.memmap(offsets_file, dtype=OFFSET_DTYPE, mode="r")
    if offsets[0] != 0 or offsets[-1] != entry.tokens:
        raise DataError(
            f"{offsets_file}: runs from {offsets[0]} to {offsets[-1]}, expected 0 to "
            f"{entry.tokens}: {_again(path)}"
        )
    if index.kind == "pairs" and entry.documents % 2:
        raise DataError(
            f"{path / INDEX}: gives {name} {entry.documents} documents, which make no pairs, since "
            f"their number is odd: {_again(path)}"
        )
    labels = _open_labels(path, name, index, entry) if index.kind == "labeled" else None
    return TokenSplit(name, tokens_file, tokens, offsets, index.vocab_size, labels)


def _open_labels(path: Path, name: SplitName, index: Index, entry: SplitEntry) -> NDArray[np.int32]:
    file = path / labels_name(name)
    expected = entry.documents * LABEL_DTYPE.itemsize
    _check_size(file, expected, f"{entry.documents} int32 labels")
    labels = np.memmap(file, dtype=LABEL_DTYPE, mode="r")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= len(index.labels):
        raise DataError(
            f"{file}: has labels {low} to {high}, but {INDEX} names {len(index.labels)}: "
            f"{_again(path)}"
        )
    return labels


def _check_offsets(path: Path, split: TokenSplit) -> None:
    """Every document has at least its end-of-text token, so each starts after the one before."""
    for begin in range(0, split.n_documents, _AT_A_TIME):
        some = np.asarray(split.offsets[begin : begin + _AT_A_TIME + 1])
        wrong = some[1:] <= some[:-1]
        if wrong.any():
            number = begin + int(wrong.argmax())
            raise DataError(
                f"{path / offsets_name(cast(SplitName, split.name))}: document {number} runs from "
                f"token {split.offsets[number]} to {split.offsets[number + 1]}, so the file is "
                f"damaged: {_again(path)}"
            )


def _check_size(file: Path, expected: int, why: str) -> None:
    if not file.is_file():
        raise DataError(f"{file}: is missing: {_again(file.parent)}")
    found = file.stat().st_size
    if found != expected:
        raise DataError(
            f"{file}: has {found} bytes, expected {expected} ({why}): {_again(file.parent)}"
        )


def _again(path: Path) -> str:
    return f"write it again with gridformer prepare SOURCE --out {path} --overwrite"
