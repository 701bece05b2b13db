"""Opens token sources: token folders, and files of Megatron-LM and datatrove where they are."""

from __future__ import annotations

import shlex
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from gridformer.config import DataConfig
from gridformer.data.indexed import Borders, Indexed
from gridformer.data.tokenfolder import (
    INDEX,
    TOKENIZER,
    Index,
    SourceEntry,
    SplitEntry,
    SplitName,
    TokenFolder,
    TokenizerEntry,
)
from gridformer.data.tokenizer import Tokenizer
from gridformer.data.tokensplit import TokenSplit
from gridformer.utils.errors import DataError

VAL_FRACTION = 0.02
SUFFIX = ".ds"
_END = np.dtype("<u8")
_DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_SEARCHED_BLOCKS, _BLOCK_TOKENS = 16, 1 << 16  # where `check` looks for ids of other vocabularies


def open_tokens(
    path: Path | str,
    tokenizer: Path | str | None = None,
    val_fraction: float = VAL_FRACTION,
) -> TokenFolder:
    """Opens a token source, whichever of these it is.

    * A token folder that `gridformer prepare` wrote.
    * Files of Megatron-LM: PREFIX.bin and PREFIX.idx, given as PREFIX or as either file.
    * A file NAME.ds of datatrove, or a folder with one.

    Foreign files are read where they are. They have no splits, so the documents at their end are
    for validation, as many as hold `val_fraction` of the tokens.

    Args:
        tokenizer: The tokenizer.json of foreign files, or its folder; None means the one beside.
        val_fraction: 0 means none, and 1 all.
    """
    path = Path(path)
    if file := _token_file(path):
        return _described(path, file, tokenizer, val_fraction)
    folder = TokenFolder.open(path)
    given = None if tokenizer is None else Tokenizer.load(tokenizer)
    if given and given.vocabulary != folder.tokenizer.vocabulary:
        raise DataError(
            f"data.tokenizer={tokenizer} is not the tokenizer with which {path} was written: omit "
            f"data.tokenizer, or prepare the folder again with --tokenizer "
            + shlex.quote(str(tokenizer))
        )
    return folder


def tokenizer_path(data: DataConfig) -> Path:
    """Returns the tokenizer.json of a run's first token source, without opening it."""
    path = data.first_path
    file = _token_file(path)
    return path / TOKENIZER if file is None else _tokenizer_file(file, data.tokenizer)


def _token_file(path: Path) -> Path | None:
    """Returns the .bin file of Megatron-LM or the .ds file of datatrove that a path names."""
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if prefix.name and not prefix.is_dir():
        both = [prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx")]
        if any(file.is_file() for file in both):
            return both[0]
    if path.suffix == SUFFIX and path.is_file():
        return path
    if not path.is_dir() or (path / INDEX).exists():
        return None
    files = sorted(path.glob(f"*{SUFFIX}"))
    if len(files) > 1:
        raise DataError(
            f"{path}: holds {len(files)} files of datatrove, and one is read: name one of them, "
            f"such as {files[0]}, name each as a source in data.sources, or join them with "
            f"datatrove's DocumentTokenizerMerger"
        )
    return files[0] if files else None


@dataclass(frozen=True)
class ForeignTokens(TokenFolder):
    """A file of tokens of another program, which is described as a token folder is."""

    borders: Borders
    loaded: Tokenizer
    loaded_from: Path

    @property
    def tokenizer_file(self) -> Path:
        return self.loaded_from

    def files(self, splits: Iterable[SplitName]) -> Mapping[str, Path]:
        """Returns the files, which hold both splits, by names without their folder."""
        files = {file.name: file for file in (self.train.path, self.borders.path)}
        return {TOKENIZER: self.loaded_from, **files}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return self.loaded

    def check(self) -> None:
        """Reads where every document begins, and some of the tokens."""
        self.borders.check()
        last = max(0, self.train.n_tokens - _BLOCK_TOKENS)
        for start in {i * last // (_SEARCHED_BLOCKS - 1) for i in range(_SEARCHED_BLOCKS)}:
            try:
                self.train.window(start, start + _BLOCK_TOKENS)
            except DataError as error:
                raise DataError(f"{error} (the vocabulary is that of {self.loaded_from})") from None


def _megatron(file: Path) -> tuple[Borders, NDArray[Any]]:
    indexed = Indexed.open(file.with_name(file.name.removesuffix(".bin") + ".idx"))
    index = indexed.path.name
    if not file.is_file():
        raise DataError(f"{file}: is missing, and {index} only says where documents begin")
    expected, size = indexed.n_tokens * indexed.dtype.itemsize, file.stat().st_size
    if size != expected:
        raise DataError(
            f"{file}: has {size} bytes, expected {expected} ({indexed.n_tokens} tokens of "
            f"{indexed.dtype.name}, as {index} says): one of them is damaged"
        )
    return indexed, np.memmap(file, indexed.dtype, "r")


@dataclass(frozen=True)
class _Ends(Borders):
    """A file NAME.ds.index of datatrove: the end of each document in tokens, uint64."""

    ends: NDArray[np.uint64]

    def at(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        before = np.asarray(self.ends[np.maximum(numbers, 1) - 1]).astype(np.int64)
        return np.where(numbers > 0, before, 0)


def _datatrove(file: Path) -> tuple[Borders, NDArray[Any]]:
    """Opens a .ds file, which holds token ids of two or four bytes, unsigned and little-endian."""
    index = file.with_name(f"{file.name}.index")
    if not index.is_file():
        raise DataError(f"{index}: is missing, and without it {file.name} cannot be read")
    size, index_bytes = file.stat().st_size, index.stat().st_size
    if not index_bytes or index_bytes % _END.itemsize:
        raise DataError(
            f"{index}: has {index_bytes} bytes, expected {_END.itemsize} for each document: it is "
            f"damaged"
        )
    ends: NDArray[np.uint64] = np.memmap(index, dtype=_END, mode="r")
    n_tokens = int(ends[-1])
    dtype = _DTYPES.get(size // n_tokens) if n_tokens and size % n_tokens == 0 else None
    if dtype is None:
        raise DataError(
            f"{file}: has {size} bytes, but {index.name} gives it {n_tokens} tokens of 2 or 4 "
            f"bytes: one of them is damaged"
        )
    return _Ends(index, len(ends), ends), np.memmap(file, dtype, "r")


def _described(
    path: Path, file: Path, tokenizer: Path | str | None, val_fraction: float
) -> ForeignTokens:
    """Opens a token file, divides it into splits, and describes it as a token folder."""
    borders, tokens = (_datatrove if file.suffix == SUFFIX else _megatron)(file)
    loaded_from = _tokenizer_file(file, tokenizer)
    loaded = Tokenizer.load(loaded_from)
    n, total = borders.n_documents, len(tokens)
    if not n or not total:
        raise DataError(f"{file}: has no documents")
    cut, first_of_val = _cut(borders, total, val_fraction)
    of_train: Any = partial(borders.starts, 0, first_of_val)
    of_val: Any = partial(borders.starts, first_of_val, n)
    counts = (first_of_val, n - first_of_val)
    if n == 1 and 0 < cut < total:  # a single document is divided
        of_train, of_val, counts = np.array([0, cut]), np.array([0, total - cut]), (1, 1)
    train = TokenSplit("train", file, tokens[:cut], of_train, loaded.vocab_size)
    val = TokenSplit("val", file, tokens[cut:], of_val, loaded.vocab_size)
    size = borders.path.stat().st_size
    entries = {
        split.name: SplitEntry.model_construct(  # without its checks, because val may be empty
            tokens=split.n_tokens,
            documents=n_documents,
            bin_bytes=split.n_tokens * tokens.dtype.itemsize,
            offsets_bytes=size,
        )
        for split, n_documents in zip((train, val), counts)
    }
    index = Index(
        dtype=cast(Any, tokens.dtype.name),
        vocab_size=loaded.vocab_size,
        eos_token=loaded.eos_token,
        eos_id=loaded.eos_id,
        seed=0,
        val_fraction=val_fraction,
        train=entries["train"],
        val=entries["val"],
        tokenizer=TokenizerEntry(origin=loaded.origin, bytes=loaded_from.stat().st_size),
        sources=(SourceEntry(source=str(path), license=None, documents=n, bytes=0),),
        skipped={},
    )
    return ForeignTokens(path, index, train, val, borders, loaded, loaded_from)


def _cut(borders: Borders, total: int, val_fraction: float) -> tuple[int, int]:
    """Returns the token and the document with which validation begins."""
    n = borders.n_documents
    if val_fraction in (0, 1):
        return (0, 0) if val_fraction else (total, n)
    wanted = total - max(1, round(val_fraction * total))
    if n == 1:
        return max(1, wanted), 1
    # The last document that begins by then, but each split gets at least one.
    low = max(1, bisect_right(range(1, n), wanted, key=lambda i: int(borders.at(np.array(i)))))
    return int(borders.at(np.array(low))), low


def _tokenizer_file(file: Path, tokenizer: Path | str | None) -> Path:
    if tokenizer is not None:
        given = Path(tokenizer)
        return given / TOKENIZER if given.is_dir() else given
    beside = file.with_name(TOKENIZER)
    if not beside.is_file():
        raise DataError(
            f"{file}: its tokenizer is not known: set data.tokenizer to the tokenizer.json that "
            f"wrote it, or to a folder that holds it, or put it there as {beside}"
        )
    return beside
