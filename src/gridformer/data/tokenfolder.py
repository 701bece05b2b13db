"""Token folders, which `gridformer prepare` writes and training reads memory-mapped.

index.json describes a folder and is written last. Of each split there are SPLIT.bin and SPLIT.idx,
which are Megatron-LM's, and a file for every column. Documents 2i and 2i + 1 are pair i.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from gridformer.config import Config
from gridformer.data.indexed import Borders, Indexed, index_bytes
from gridformer.data.tokenizer import SETTINGS, Tokenizer
from gridformer.data.tokensplit import LABELS, Column, TokenSplit
from gridformer.utils.errors import DataError
from gridformer.utils.files import UnreadableError, exists, meant_beside, read_json

FORMAT: Final = "gridformer-tokens"
VERSION: Final = 3
INDEX = "index.json"
TOKENIZER = "tokenizer.json"
Kind = Literal["text", "pairs", "labeled", "chat", "examples"]
SplitName = Literal["train", "val"]
SPLITS: tuple[SplitName, ...] = ("train", "val")
COLUMN_NAME: Final = r"[a-z][a-z0-9_]*"
_OWN_FILE = re.compile(
    rf"{re.escape(INDEX)}|{re.escape(TOKENIZER)}|{re.escape(SETTINGS)}|chat\.json|"
    rf"(train|val)\.(bin|idx|questions\.jsonl|{COLUMN_NAME}\.bin)"
)


def is_own_file(name: str) -> bool:
    """Returns whether a token folder may contain a file of this name."""
    return _OWN_FILE.fullmatch(name) is not None


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Returns the dtype of a token file: uint16 if every id of the vocabulary fits, else int32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<i4")


class SplitEntry(Config):
    """The size of one split: its tokens and documents, and the bytes of their two files."""

    tokens: int = Field(ge=1)
    documents: int = Field(ge=1)
    bin_bytes: int = Field(ge=1)
    offsets_bytes: int = Field(ge=1, description="of the file that says where documents begin")


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
    """The content of index.json."""

    format: Literal["gridformer-tokens"] = FORMAT
    version: Literal[3] = VERSION
    kind: Kind = "text"
    languages: tuple[str, str] | None = None  # of a pair's two texts
    labels: tuple[str, ...] = ()  # the name of each label number
    columns: dict[Annotated[str, Field(pattern=f"^{COLUMN_NAME}$")], Column] = Field(
        default_factory=dict, description="the columns of both splits by name"
    )
    dtype: Literal["uint16", "int32", "uint32", "uint8", "int8", "int16", "int64"]
    vocab_size: int = Field(ge=1)
    eos_token: str
    eos_id: int = Field(ge=0)
    bos_token: str | None = None  # with which documents begin, if there is one
    ends: bool = True  # whether documents end with the end-of-text token
    seed: int = Field(ge=-(2**63), lt=2**64)
    val_fraction: float
    train: SplitEntry
    val: SplitEntry
    tokenizer: TokenizerEntry
    sources: tuple[SourceEntry, ...]
    skipped: dict[str, int]

    def entry(self, split: SplitName) -> SplitEntry:
        return self.train if split == "train" else self.val

    def files(self, split: SplitName) -> tuple[str, ...]:
        """The names of a split's files."""
        return f"{split}.bin", f"{split}.idx", *(f"{split}.{name}.bin" for name in self.columns)


@dataclass(frozen=True)
class TokenFolder:
    """An open token folder, or token files of another program that are described as one."""

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

    @property
    def tokenizer_file(self) -> Path:
        return self.path / TOKENIZER

    def files(self, splits: Iterable[SplitName]) -> Mapping[str, Path]:
        """Returns the files of splits and the tokenizer, by names without their folder."""
        names = (name for split in splits for name in self.index.files(split))
        return {TOKENIZER: self.tokenizer_file} | {name: self.path / name for name in names}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer."""
        tokenizer = Tokenizer.load(self.tokenizer_file, self.index.eos_token, self.index.bos_token)
        there = (tokenizer.vocab_size, tokenizer.eos_id)
        if there != (self.vocab_size, self.eos_id):
            raise DataError(
                f"{self.tokenizer_file}: has vocabulary and end-of-text id {there}, but {INDEX} "
                f"says {(self.vocab_size, self.eos_id)}: it was replaced, so prepare the folder "
                f"again"
            )
        return tokenizer

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Opens a folder after comparing every file with the index."""
        path = Path(path)
        index = read_index(path)
        dtype = token_dtype(index.vocab_size)
        eos_id, size = index.eos_id, index.vocab_size
        if dtype.name != index.dtype:
            what = f"says {index.dtype}, but a vocabulary of {size} is written as {dtype.name}"
            raise _damaged(path / INDEX, what)
        if eos_id >= size:
            what = f"end-of-text id {eos_id} is outside the vocabulary of {size}"
            raise _damaged(path / INDEX, what)
        _check_size(path / TOKENIZER, index.tokenizer.bytes, f"as {INDEX} says")
        train, val = (_open_split(path, name, index, dtype) for name in SPLITS)
        return cls(path, index, train, val)

    def check(self) -> None:
        """Reads what `open` does not: the tokenizer, and where every document begins.

        A launcher calls this before it starts processes, so that none of them finds it out.
        """
        for split in SPLITS:
            with _remedied(self.path):
                Indexed.open(self.path / f"{split}.idx").check()
        self.tokenizer  # noqa: B018 (reading it is the check)


def is_token_folder(path: Path) -> bool:
    """Returns whether a folder has a token folder's index, even if it is damaged."""
    try:
        raw = read_json(path / INDEX)
    except UnreadableError:
        return False
    return isinstance(raw, dict) and raw.get("format") == FORMAT


def read_index(path: Path) -> Index:
    """Reads the index of a token folder."""
    if not exists(path):
        meant = meant_beside(path, is_token_folder)
        raise DataError(
            f"{path}: no such token folder"
            + (f" (did you mean '{meant}'?)" if meant else "")
            + "; write one, for instance from Python's own sources: "
            f"gridformer prepare python-stdlib --out {shlex.quote(str(path))}"
        )
    file = path / INDEX
    if not exists(file):
        raise DataError(
            f"{path}: is not a token folder, because it has no {INDEX}; write one with "
            f"gridformer prepare SOURCE --out FOLDER"
        )
    with _remedied(path):
        raw = read_json(file)
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise DataError(
            f'{file}: is not the index of a token folder ("format" is not "{FORMAT}"); write one '
            f"with gridformer prepare SOURCE --out FOLDER"
        )
    if raw.get("version") != VERSION:
        what = f"has version {raw.get('version')} of the format, but this gridformer reads version"
        raise _damaged(file, f"{what} {VERSION}")
    try:
        return Index.model_validate(raw)
    except ValidationError as error:
        where = {".".join(str(part) for part in e["loc"]): e["msg"].lower() for e in error.errors()}
        problems = "; ".join(f"{key}: {message}" for key, message in where.items())
        raise _damaged(file, f"is damaged ({problems})") from None


def _open_split(path: Path, name: SplitName, index: Index, dtype: np.dtype[Any]) -> TokenSplit:
    entry, n = index.entry(name), index.entry(name).documents
    tokens_file, borders_file = path / f"{name}.bin", path / f"{name}.idx"
    n_bytes, tokens = entry.tokens * dtype.itemsize, f"{entry.tokens} tokens of {dtype.name}"
    for file, recorded, expected, why in (
        (tokens_file, entry.bin_bytes, n_bytes, tokens),
        (borders_file, entry.offsets_bytes, index_bytes(n), f"the index of {n} documents"),
    ):
        if recorded != expected:
            what = f"gives {file.name} {recorded} bytes, but {why} take {expected}"
            raise _damaged(path / INDEX, what)
        _check_size(file, expected, why)
    if index.kind == "pairs" and n % 2:
        what = f"gives {name} {n} documents, which make no pairs, since their number is odd"
        raise _damaged(path / INDEX, what)
    borders = _open_borders(borders_file, entry, dtype)
    columns = {key: _open_column(path, name, index, key) for key in index.columns}
    ids = np.memmap(tokens_file, dtype=dtype, mode="r")
    return TokenSplit(name, tokens_file, ids, borders.starts, index.vocab_size, columns)


def _open_borders(file: Path, entry: SplitEntry, dtype: np.dtype[Any]) -> Borders:
    with _remedied(file.parent):
        indexed = Indexed.open(file)
    n = indexed.n_documents
    if (indexed.dtype, n) != (dtype, entry.documents):
        what = f"describes {n} documents of {indexed.dtype.name}, but {INDEX} {entry.documents} of"
        raise _damaged(file, f"{what} {dtype.name}")
    if indexed.n_tokens != entry.tokens:
        raise _damaged(file, f"runs from 0 to {indexed.n_tokens}, expected 0 to {entry.tokens}")
    return indexed


def _open_column(path: Path, split: SplitName, index: Index, name: str) -> NDArray[Any]:
    column, entry = index.columns[name], index.entry(split)
    file = path / f"{split}.{name}.bin"
    rows = entry.documents if column.per == "document" else entry.tokens
    what = "labels" if name == LABELS else f"values of each of {rows} {column.per}s"
    why = f"{rows if name == LABELS else column.width} {column.dtype} {what}"
    _check_size(file, rows * column.item_bytes, why)
    shape = (rows,) if column.width == 1 else (rows, column.width)
    values: NDArray[Any] = np.memmap(file, dtype=column.item, mode="r", shape=shape)
    n = len(index.labels)
    if name == LABELS:
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= n:
            raise _damaged(file, f"has labels {low} to {high}, but {INDEX} names {n}")
    return values


def _check_size(file: Path, expected: int, why: str) -> None:
    if not file.is_file():
        raise _damaged(file, "is missing")
    if (size := file.stat().st_size) != expected:
        raise _damaged(file, f"has {size} bytes, expected {expected} ({why})")


@contextmanager
def _remedied(path: Path) -> Iterator[None]:
    """Adds to errors of reading a file of a folder how to write the folder again."""
    try:
        yield
    except (DataError, UnreadableError) as error:
        raise DataError(f"{error}: {_again(path)}") from None


def _damaged(file: Path, what: str) -> DataError:
    return DataError(f"{file}: {what}: {_again(file.parent)}")


def _again(path: Path) -> str:
    out = shlex.quote(str(path))
    return f"write it again with gridformer prepare SOURCE --out {out} --overwrite"
